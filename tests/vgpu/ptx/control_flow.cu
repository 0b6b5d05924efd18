// Divergence, locks and waits: kernels whose result depends on how lanes and blocks take turns.
//   nvcc -ptx -arch=sm_80 -lineinfo control_flow.cu -o control_flow.ptx
#include <cuda_runtime.h>

// steps[i]: length of the Collatz sequence of start[i], with a seven-way switch on each element that changes what is
// added to hash[i].
extern "C" __global__ void collatz(const int* start, int* steps, unsigned* hash, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  long long x = start[i];
  int count = 0;
  unsigned h = 1;
  while (x != 1) {
    switch (x % 7) {
      case 0:
        h = h * 31 + 7;
        break;
      case 1:
        h ^= h >> 3;
        break;
      case 2:
        h += static_cast<unsigned>(x);
        break;
      case 3:
        h = __brev(h);
        break;
      case 4:
        h = h << 5 | h >> 27;
        break;
      case 5:
        h -= 0x9e3779b9u;
        break;
      case 6:
        h = ~h;
        break;
    }
    x = x % 2 ? 3 * x + 1 : x / 2;
    ++count;
  }
  steps[i] = count;
  hash[i] = h;
}

// Odd and even lanes sum among themselves, each in its own branch and a different number of times.
extern "C" __global__ void shuffle_in_branches(const int* in, int* out) {
  const int lane = threadIdx.x % 32;
  int v = in[threadIdx.x];
  if (lane % 2) {
    for (int o = 16; o > 1; o >>= 1) v += __shfl_xor_sync(0xaaaaaaaa, v, o);
    if (lane % 4 == 3) v = -v;
  } else {
    for (int o = 16; o > 1; o >>= 1) v = max(v, __shfl_xor_sync(0x55555555, v, o));
  }
  out[threadIdx.x] = v;
}

// Every thread increments *counter in a critical section: a lock between the lanes of one warp, too.
extern "C" __global__ void spin_lock(int* lock, int* counter, int* order) {
  bool done = false;
  while (!done) {
    if (atomicCAS(lock, 0, 1) == 0) {
      __threadfence();
      const int ticket = *static_cast<volatile int*>(counter);
      order[ticket] = blockIdx.x * blockDim.x + threadIdx.x;
      *static_cast<volatile int*>(counter) = ticket + 1;
      __threadfence();
      atomicExch(lock, 0);
      done = true;
    }
  }
}

// The same with the wait as a loop of its own: the lane that holds the lock is not in the loop.
extern "C" __global__ void spin_lock_loop(int* lock, int* counter) {
  while (atomicCAS(lock, 0, 1) != 0) {
  }
  __threadfence();
  *static_cast<volatile int*>(counter) += 1;
  __threadfence();
  atomicExch(lock, 0);
}

// Lanes wait for a flag that another lane of their warp sets later in the program.
extern "C" __global__ void lane_waits_for_lane(int* flags, int* out) {
  const int lane = threadIdx.x;
  if (lane < 31)
    while (atomicAdd(flags + lane + 1, 0) == 0) {
    }
  out[lane] = 31 - lane;
  __threadfence();
  atomicExch(flags + lane, 1);
}

// A barrier between all blocks: out[i] = sum of every block's value.
extern "C" __global__ void grid_wait(int* arrived, int* values, int* out) {
  if (threadIdx.x == 0) {
    values[blockIdx.x] = blockIdx.x + 1;
    __threadfence();
    atomicAdd(arrived, 1);
    while (*static_cast<volatile int*>(arrived) < gridDim.x) {
    }
  }
  __syncthreads();
  int sum = 0;
  for (int b = 0; b < gridDim.x; ++b) sum += static_cast<volatile int*>(values)[b];
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// Each block waits for the one before it: a chain that needs them in order.
extern "C" __global__ void chained_scan(const int* in, int* out, volatile int* ready) {
  __shared__ int before;
  if (threadIdx.x == 0) {
    if (blockIdx.x > 0)
      while (ready[blockIdx.x - 1] == 0) {
      }
    __threadfence();
    before = blockIdx.x ? *static_cast<volatile int*>(out + blockIdx.x - 1) : 0;
    out[blockIdx.x] = before + in[blockIdx.x];
    __threadfence();
    ready[blockIdx.x] = 1;
  }
  __syncthreads();
}

// Waits for a flag that nobody sets.
extern "C" __global__ void waits_for_ever(volatile int* flag) {
  while (*flag == 0) {
  }
}

// Half of the block skips a barrier that the other half waits at.
extern "C" __global__ void skipped_barrier(int* out) {
  if (threadIdx.x >= 64) {
    __syncthreads();
    out[threadIdx.x] = 1;
  } else {
    while (*static_cast<volatile int*>(out + 64 + threadIdx.x) == 0) {
    }
  }
}

// A barrier that half a warp reaches while the other half waits for it elsewhere.
extern "C" __global__ void barrier_in_half_a_warp(int* out) {
  if (threadIdx.x % 2) {
    __syncthreads();
    out[threadIdx.x] = 1;
  }
  __syncwarp();
  out[threadIdx.x] += 1;
}

// An array per thread that registers cannot hold.
extern "C" __global__ void local_memory(const int* index, int* out, int n) {
  int table[64];
  for (int i = 0; i < 64; ++i) table[i] = i * i + threadIdx.x;
  for (int i = 0; i < n; ++i) table[index[i] & 63] += table[(index[i] + i) & 63];
  int sum = 0;
  for (int i = 0; i < 64; ++i) sum = sum * 3 + table[i];
  out[threadIdx.x] = sum;
}

// Some lanes exit at once; the rest goes on through barriers.
extern "C" __global__ void early_exit(const int* leaves, int* out) {
  __shared__ int alive;
  if (threadIdx.x == 0) alive = 0;
  __syncthreads();
  if (leaves[threadIdx.x]) return;
  atomicAdd(&alive, 1);
  __syncthreads();
  out[threadIdx.x] = alive;
}
