// Lists of tensors for the multi-tensor kernels.
//
// A launch gets the rows of its tensors (addresses and sizes) as a kernel argument: nothing is copied
// to the device beforehand, nothing waits, and a captured CUDA graph holds all it needs. Arguments
// may take 32,764 bytes; longer lists take several launches. Tensors are cut into blocks of kBlock
// elements, one thread block each; which block an element falls into depends on its tensor alone, so
// a sum that is kept per block and added up in block order has the same bits for any launch.
#pragma once
#include "cuda/launch.cuh"
#include "trainwright/pack.cuh"

namespace tw {

constexpr int kListThreads = 256;
constexpr int64_t kListBlock = 8192;  // elements: 4 KiB and more of each operand per warp

// Row is a struct with the member first_block: blocks in the rows before it.
template<class Row>
struct RowTable {
  static constexpr int kCapacity = 32000 / sizeof(Row);
  Row rows[kCapacity];
  int count;
};

// The row that block blockIdx.x belongs to: the last whose first_block is not above it.
template<class Row>
__device__ __forceinline__ const Row& row_of_block(const RowTable<Row>& table) {
  int low = 0;
  for (int high = table.count; high - low > 1;) {
    const int middle = (low + high) / 2;
    if (table.rows[middle].first_block <= static_cast<int>(blockIdx.x))
      low = middle;
    else
      high = middle;
  }
  return table.rows[low];
}

// Calls launch(table, blocks, blocks of the launches before) for as many tables as the rows need.
// elements(row) says how long a row is; empty rows are left out.
template<class Row, class F, class G>
void for_tables(const Row* rows, int64_t count, F&& elements, G&& launch) {
  constexpr int64_t most_blocks = 1 << 30;
  RowTable<Row> table;
  int64_t blocks = 0, before = 0;
  table.count = 0;
  const auto flush = [&] {
    if (table.count > 0) launch(table, static_cast<unsigned>(blocks), before);
    before += blocks;
    blocks = table.count = 0;
  };
  for (int64_t i = 0; i < count; ++i) {
    const int64_t more = divide_up(elements(rows[i]), kListBlock);
    if (more == 0) continue;
    if (table.count == RowTable<Row>::kCapacity || blocks + more > most_blocks) flush();
    table.rows[table.count] = rows[i];
    table.rows[table.count++].first_block = static_cast<int>(blocks);
    blocks += more;
  }
  flush();
}
template<class Row, class F>
int64_t count_blocks(const Row* rows, int64_t count, F&& elements) {
  int64_t blocks = 0;
  for (int64_t i = 0; i < count; ++i) blocks += divide_up(elements(rows[i]), kListBlock);
  return blocks;
}

}  // namespace tw
