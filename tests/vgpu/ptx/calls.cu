// Device functions that nvcc does not inline: pow of the maths library, and our own with early returns and local memory.
//   nvcc -ptx -arch=sm_80 -lineinfo calls.cu -o calls.ptx
extern "C" __global__ void power(const double* x, const double* y, double* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = pow(x[i], y[i]) + pow(y[i], 2.5);
}

// Digits of n in a base, as a polynomial in 100; -1 for a base out of range.
__device__ __noinline__ long long digits(int n, int base) {
  if (base < 2 || base > 36) return -1;
  int stack[32], top = 0;
  while (n > 0) {
    stack[top++ & 31] = n % base;
    n /= base;
  }
  long long value = 0;
  while (top > 0) value = value * 100 + stack[--top & 31];
  return value;
}
__device__ __noinline__ long long both(int n, int base) {
  if (n % 3 == 0) return digits(n, base);
  return digits(n, base) + digits(n + 1, base);
}
extern "C" __global__ void call_twice(const int* n, const int* base, long long* out) {
  const int i = threadIdx.x;
  long long value = both(n[i], base[i]);
  if (n[i] % 2) value -= digits(n[i], 10);
  out[i] = value;
}
