// Cuts a list of rows of different lengths into blocks of kBlock elements (the last of a row may be
// shorter) and spreads them over the threads by elements, so that thousands of small rows
// parallelise as well as one long one. What belongs to a block never depends on the thread count: a
// sum that is kept per block and added up in block order has the same bits on any machine.
#pragma once
#include "trainwright/parallel.h"

namespace tw {
inline constexpr int64_t kBlock = 16384;  // elements: a block of every operand stays in L2

struct BlockTable {
  const int64_t* start;  // (rows + 1): elements in the rows before this one
  const int64_t* first;  // (rows + 1): blocks in the rows before this one
  int64_t rows;
};
}  // namespace tw

TW_BEGIN

// Calls body(row, begin, end, block) for each block; a block is called by the thread whose share
// holds its first element.
template<class F>
inline void for_blocks(const BlockTable& t, F&& body) {
  parallel_for(0, t.start[t.rows], kBlock, [&](int64_t b, int64_t e) {
    int64_t row = 0;  // the last row that starts at or before b
    for (int64_t high = t.rows; high - row > 1;) {
      const int64_t middle = (row + high) / 2;
      (t.start[middle] <= b ? row : high) = middle;
    }
    int64_t begin = (b - t.start[row] + kBlock - 1) / kBlock * kBlock;
    while (row < t.rows && t.start[row] + begin < e) {
      const int64_t n = t.start[row + 1] - t.start[row];
      if (begin < n) {
        const int64_t end = begin + kBlock < n ? begin + kBlock : n;
        body(row, begin, end, t.first[row] + begin / kBlock);
        begin += kBlock;
      }
      if (begin >= n) {
        ++row;
        begin = 0;
      }
    }
  });
}

TW_END
