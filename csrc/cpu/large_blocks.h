// Memory of large outputs: kept for the next one of its size.
//
// malloc maps anything above 32 MiB anew and unmaps it when freed, so a training loop pays for the same pages in every step:
// the system clears them and traps on each first write. For a kernel that writes once that costs more than the writing
// (823 MB, 2 threads, virtual machine, Linux 6.18: 280 ms to write in fresh pages of 4 KiB, 124 ms in fresh pages of 2 MiB,
// 90 ms in memory used before). So blocks are mapped here in pages of 2 MiB and stay mapped when their tensor dies.
//
// - Never more is mapped than was in use at one time: idle blocks go when a new one would exceed that mark.
// - Idle blocks are marked MADV_FREE: the system takes their pages back when it runs short (the resident set shows them
//   until then). trainwright.empty_cache() gives them back at once.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <vector>

namespace tw {

class LargeBlocks {
 public:
  static constexpr size_t kMinBytes = size_t{32} << 20;  // below, malloc itself keeps what is freed

  // One per process, never destroyed: tensors may outlive every static object.
  static LargeBlocks& instance() {
    static auto* blocks = new LargeBlocks;
    return *blocks;
  }

  // At least `bytes`, aligned to 2 MiB, contents undefined; null if the system refuses.
  void* take(size_t bytes) {
    bytes = rounded(bytes);
    const std::lock_guard lock(mutex_);
    for (auto block = idle_.rbegin(); block != idle_.rend(); ++block) {
      if (block->bytes != bytes) continue;
      void* memory = block->memory;
      idle_.erase(std::next(block).base());
      idle_bytes_ -= bytes;
      used_bytes_ += bytes;
      return memory;
    }
    if (used_bytes_ + bytes > peak_bytes_) peak_bytes_ = used_bytes_ + bytes;
    while (!idle_.empty() && used_bytes_ + bytes + idle_bytes_ > peak_bytes_) drop_oldest();
    void* memory = map(bytes);
    while (memory == nullptr && !idle_.empty()) {
      drop_oldest();
      memory = map(bytes);
    }
    if (memory != nullptr) used_bytes_ += bytes;
    return memory;
  }

  void drop_idle() {
    const std::lock_guard lock(mutex_);
    while (!idle_.empty()) drop_oldest();
    peak_bytes_ = used_bytes_;
  }

  void give_back(void* memory, size_t bytes) {
    bytes = rounded(bytes);
    madvise(memory, bytes, MADV_FREE);
    const std::lock_guard lock(mutex_);
    idle_.push_back({memory, bytes});
    idle_bytes_ += bytes;
    used_bytes_ -= bytes;
  }

 private:
  struct Block {
    void* memory;
    size_t bytes;
  };
  static constexpr size_t kPage = size_t{2} << 20;

  static size_t rounded(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

  static void* map(size_t bytes) {
    void* memory =
        mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    char* const mapped = static_cast<char*>(memory);
    char* const begin = reinterpret_cast<char*>(rounded(reinterpret_cast<uintptr_t>(mapped)));
    const size_t before = static_cast<size_t>(begin - mapped);
    if (before > 0) munmap(mapped, before);
    if (kPage > before) munmap(begin + bytes, kPage - before);
    madvise(begin, bytes, MADV_HUGEPAGE);  // a hint: where it is refused nothing is lost
    return begin;
  }

  void drop_oldest() {
    munmap(idle_.front().memory, idle_.front().bytes);
    idle_bytes_ -= idle_.front().bytes;
    idle_.erase(idle_.begin());
  }

  std::mutex mutex_;
  std::vector<Block> idle_;  // oldest first
  size_t used_bytes_ = 0, idle_bytes_ = 0, peak_bytes_ = 0;
};

}  // namespace tw
#endif
