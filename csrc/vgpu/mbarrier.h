// The mbarrier object: 64 bits of shared memory that count arrivals and bytes.
//
// A phase ends when all expected arrivals are in and the transaction count is zero; the next one then starts with the
// expected count. Bytes may be counted as complete before they are announced, so the transaction count can be negative.
// The object lies in shared memory as the program sees it, packed as below; the contents are opaque to programs.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace tw::vgpu {

class MBarrier {
 public:
  static constexpr uint32_t kMaxCount = (1u << 20) - 1;
  static constexpr int64_t kMaxBytes = (1 << 20) - 1;

  // What went wrong, or null.
  using Error = const char*;

  static MBarrier load(const void* memory) {
    MBarrier b;
    std::memcpy(&b.bits_, memory, 8);
    return b;
  }
  void store(void* memory) const { std::memcpy(memory, &bits_, 8); }

  static MBarrier initialised(uint32_t count) {
    MBarrier b;
    b.set(count, count, 0, false);
    return b;
  }
  static MBarrier invalidated() { return {}; }
  // Whether init has run here and inval has not.
  bool valid() const { return (bits_ >> 62) == kTag; }

  uint32_t pending() const { return static_cast<uint32_t>(bits_ & kMaxCount); }
  uint32_t expected() const { return static_cast<uint32_t>(bits_ >> 20 & kMaxCount); }
  // Announced bytes less completed ones.
  int64_t bytes() const { return static_cast<int64_t>(bits_ << 3) >> 43; }
  bool phase() const { return bits_ >> 61 & 1; }

  // Whether the phase of that parity is over (a new barrier is in phase 0: the one before it, of parity 1, is over).
  bool done(bool parity) const { return phase() != parity; }
  // A token names the phase that it was taken in.
  uint64_t token() const { return bits_; }
  bool done_token(uint64_t token) const { return done(token >> 61 & 1); }
  static uint32_t pending_of(uint64_t token) { return static_cast<uint32_t>(token & kMaxCount); }

  // Announces bytes.
  Error expect(int64_t n) { return add_bytes(n); }
  // Bytes have come; ends the phase if they were the last thing missing.
  Error complete(int64_t n) {
    if (Error e = add_bytes(-n)) return e;
    advance();
    return nullptr;
  }
  // The phase expects `count` more arrivals (cp.async.mbarrier.arrive without .noinc).
  Error add_pending(uint32_t count) {
    if (pending() + count > kMaxCount) return "pending count out of range";
    set(pending() + count, expected(), bytes(), phase());
    return nullptr;
  }
  // `count` arrivals; with `drop` they are not expected in later phases either.
  Error arrive(uint32_t count, bool drop = false) {
    if (count > pending()) return "more arrivals than the phase still expects";
    set(pending() - count, expected() - (drop ? count : 0), bytes(), phase());
    advance();
    return nullptr;
  }

 private:
  static constexpr uint64_t kTag = 2;  // memory of zeros is no barrier

  void set(uint32_t pending, uint32_t expected, int64_t bytes, bool phase) {
    bits_ = kTag << 62 | uint64_t{phase} << 61 | (static_cast<uint64_t>(bytes) & 0x1fffff) << 40 |
            uint64_t{expected} << 20 | pending;
  }
  Error add_bytes(int64_t n) {
    const int64_t sum = bytes() + n;
    if (sum > kMaxBytes || sum < -kMaxBytes) return "transaction count out of range";
    set(pending(), expected(), sum, phase());
    return nullptr;
  }
  void advance() {
    if (pending() == 0 && bytes() == 0) set(expected(), expected(), 0, !phase());
  }

  uint64_t bits_ = 0;
};

}  // namespace tw::vgpu
