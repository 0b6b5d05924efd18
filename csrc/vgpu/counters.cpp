#include "vgpu/counters.h"

#include <algorithm>
#include <bit>

#include "vgpu/block.h"

namespace tw::vgpu {

void Count::add(const Count& other) {
  issues += other.issues;
  lanes += other.lanes;
  const auto sum = [](Traffic& to, const Traffic& from) {
    to.requests += from.requests;
    to.bytes += from.bytes;
    to.sectors += from.sectors;
  };
  sum(load, other.load);
  sum(store, other.store);
  shared_requests += other.shared_requests;
  wavefronts += other.wavefronts;
  ideal_wavefronts += other.ideal_wavefronts;
  local_bytes += other.local_bytes;
}

// ---- footprint

void Footprint::cover(const GlobalMap& memory) {
  ranges_.clear();
  for (const Allocation& a : memory.ranges()) {
    const uint64_t first = a.address / kSectorBytes;
    const uint64_t last = (a.address + a.bytes - 1) / kSectorBytes;
    if (!ranges_.empty() && first <= ranges_.back().last)
      ranges_.back().last = std::max(last, ranges_.back().last);
    else
      ranges_.push_back({first, last, nullptr});
  }
  for (Range& r : ranges_)
    r.bits = std::make_unique<std::atomic<uint64_t>[]>((r.last - r.first) / 64 + 1);
}

void Footprint::mark(uint64_t address, uint64_t bytes) {
  const uint64_t first = address / kSectorBytes, last = (address + bytes - 1) / kSectorBytes;
  const auto next = std::upper_bound(ranges_.begin(), ranges_.end(), first,
                                     [](uint64_t s, const Range& r) { return s < r.first; });
  if (next == ranges_.begin()) return;
  Range& r = *std::prev(next);
  for (uint64_t s = first; s <= std::min(last, r.last); ++s) {
    const uint64_t bit = uint64_t{1} << ((s - r.first) & 63);
    std::atomic<uint64_t>& word = r.bits[(s - r.first) / 64];
    if (!(word.load(std::memory_order_relaxed) & bit))
      word.fetch_or(bit, std::memory_order_relaxed);
  }
}

uint64_t Footprint::sectors() const {
  uint64_t sum = 0;
  for (const Range& r : ranges_)
    for (uint64_t i = 0; i <= (r.last - r.first) / 64; ++i)
      sum += static_cast<uint64_t>(std::popcount(r.bits[i].load(std::memory_order_relaxed)));
  return sum;
}

// ---- one warp-wide access

namespace {

// How many different values there are; sorts them.
template<class T>
uint32_t distinct(T* values, uint32_t n) {
  if (!std::is_sorted(values, values + n)) std::sort(values, values + n);
  return static_cast<uint32_t>(std::unique(values, values + n) - values);
}

// Wavefronts for the lanes that are served together.
uint32_t wavefronts_of(const Access& a, uint32_t lanes) {
  uint32_t words[kLanes], n = 0;
  const uint32_t per_lane = std::max<uint32_t>(a.bytes / 4, 1);
  for (uint32_t left = lanes; left; left &= left - 1) {
    const auto word = static_cast<uint32_t>(a.address[std::countr_zero(left)]) / 4;
    for (uint32_t i = 0; i < per_lane; ++i) words[n++] = word + i;
  }
  n = distinct(words, n);
  uint8_t in_bank[32] = {}, most = 0;
  for (uint32_t i = 0; i < n; ++i) most = std::max(most, ++in_bank[words[i] % 32]);
  return most;
}

void count_shared(Count& c, const Access& a) {
  ++c.shared_requests;
  const uint32_t group = a.bytes <= 4 ? 32 : a.bytes == 8 ? 16 : 8;
  for (uint32_t first = 0; first < kLanes; first += group) {
    const uint32_t lanes = a.lanes & (kAllLanes >> (32 - group) << first);
    if (!lanes) continue;
    ++c.ideal_wavefronts;
    c.wavefronts += wavefronts_of(a, lanes);
  }
}

}  // namespace

// ---- observer

class Counters::Watch : public Observer {
 public:
  explicit Watch(Counters& counters) : all_(counters), counts_(counters.counts_.size()) {}
  ~Watch() override {
    const std::lock_guard lock(all_.mutex_);
    for (size_t i = 0; i < counts_.size(); ++i) all_.counts_[i].add(counts_[i]);
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void block_start(Block& block) override {
    const size_t warps = block.warps().size();
    last_.resize(std::max(last_.size(), (block.rank() + 1) * warps));
    std::fill_n(last_.begin() + static_cast<ptrdiff_t>(block.rank() * warps), warps, kNone);
  }

  void instruction(Warp& w, const Instr& in, uint32_t lanes) override {
    const uint32_t pc = all_.program_.pc_of(in);
    uint32_t& last = last_[w.block().rank() * w.block().warps().size() + w.index()];
    // A waiting instruction is tried again and again.
    if (last == pc && all_.program_.origins[pc].explain) return;
    last = pc;
    ++counts_[pc].issues;
    counts_[pc].lanes += static_cast<uint64_t>(std::popcount(lanes));
  }

  void access(Warp&, const Instr& in, const Access& a) override {
    if (in.kind == Class::constant_memory || !a.counted) return;
    Count& c = counts_[all_.program_.pc_of(in)];
    switch (a.space) {
      case ptx::Space::shared:
        if (!a.async_proxy) count_shared(c, a);
        break;
      case ptx::Space::local:
        c.local_bytes += static_cast<uint64_t>(std::popcount(a.lanes)) * a.bytes;
        break;
      default:
        count_global(c, a);
    }
  }

 private:
  void count_global(Count& c, const Access& a) {
    Count::Traffic& t = a.store ? c.store : c.load;
    uint64_t address[kLanes], sectors[kLanes];
    uint32_t n = 0;
    for (uint32_t left = a.lanes; left; left &= left - 1)
      address[n++] = a.address[std::countr_zero(left)];
    n = distinct(address, n);
    ++t.requests;
    t.bytes += uint64_t{n} * a.bytes;
    if (a.bytes <= kSectorBytes) {  // aligned, so in one sector each
      for (uint32_t i = 0; i < n; ++i) sectors[i] = address[i] / kSectorBytes;
      t.sectors += distinct(sectors, n);
    } else {
      for (uint32_t i = 0; i < n; ++i)
        t.sectors += (address[i] + a.bytes - 1) / kSectorBytes - address[i] / kSectorBytes + 1;
    }
    for (uint32_t i = 0; i < n; ++i) {
      if (a.load) all_.read_.mark(address[i], a.bytes);
      if (a.store) all_.written_.mark(address[i], a.bytes);
    }
  }

  Counters& all_;
  std::vector<Count> counts_;
  std::vector<uint32_t> last_;  // pc, by warp of the cluster
};

std::unique_ptr<Observer> Counters::watch() { return std::make_unique<Watch>(*this); }

}  // namespace tw::vgpu
