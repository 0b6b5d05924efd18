// Asynchronous work of a thread block: cp.async, bulk and tensor copies, wgmma.
//
// Everything here runs as late as the program allows: when a thread waits for it, or, for work that reports to an
// mbarrier, when nobody in the cluster can go on without it. So data that is used without the wait it needs is not there.
//   cp.async                    at the wait_group (wait_all) of its thread, or for the mbarrier that its arrive names
//   bulk copies with mbarrier   when all warps wait, those first that somebody waits for
//   bulk copies in groups       read at wait_group.read, written at wait_group or when the block ends
//   wgmma                       at wait_group of the first warp of the warpgroup, for all four: it is one operation of
//                               them all, so one thread may hand its operands back for all
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "vgpu/block.h"
#include "vgpu/tma.h"

namespace tw::vgpu {

// One cp.async of a warp. Addresses were checked when it was issued.
struct Copy {
  const Instr* in;
  uint64_t id;     // of lane 0's part; lane l's is id + l
  uint32_t lanes;  // still to do
  uint32_t group;  // of these lanes: groups committed before it
  uint32_t bytes;
  std::array<uint8_t, kLanes> size;  // bytes that are copied; the rest is zero
  std::array<uint8_t*, kLanes> to;
  std::array<const uint8_t*, kLanes> from;
};

// One wgmma.mma_async: a warp's part of it.
struct Wgmma {
  const Instr* in;
  uint64_t id;      // counts those of the warp, and so of its warpgroup
  uint64_t a, b;    // descriptors
  bool accumulate;  // scale-d
  uint32_t group;
  bool done = false;
};

struct BulkOperation {
  enum class Kind : uint8_t {
    load,         // memory -> shared, bytes
    load_tensor,  // tensor -> shared
    store,        // shared -> memory, bytes; a reduction with `reduces`
    store_tensor,
    arrive_copies,  // cp.async.mbarrier.arrive
    store_values,   // st.async, red.async
  };
  Kind kind;
  Warp* warp;
  const Instr* in;
  int lane;
  uint64_t id = 0;
  // Loads: one shared range for each destination block; and the mbarrier there.
  struct Target {
    Block* block;
    uint32_t shared;
    uint8_t* data;
    uint8_t* barrier;
  };
  std::vector<Target> targets;
  TensorMap map;
  std::array<int32_t, TensorMap::kMaxRank> coordinates;
  const uint8_t* source = nullptr;  // load: host memory of the source
  bool global_source = false;
  uint8_t* destination = nullptr;  // store: of the destination
  uint32_t shared = 0;             // store: source
  uint64_t bytes = 0;
  bool reduces = false;
  Reduction reduction = Reduction::add;
  TensorType type = TensorType::u8;
  // Groups.
  uint32_t group = 0;
  bool grouped = false;
  bool was_read = false;
  std::vector<uint8_t> values;  // what was read, chunk by chunk in the order of the box
  // arrive_copies: of these lanes, issued before `id`
  uint32_t lanes = 0;
  std::array<uint8_t*, kLanes> barriers;
};

class Async : public Extension {
 public:
  struct OfWarp {
    std::vector<Copy> copies;
    uint64_t operations = 0;                     // issued so far: numbers them
    std::array<uint32_t, kLanes> copy_groups{};  // committed so far
    std::array<uint32_t, kLanes> bulk_groups{};
    std::vector<Wgmma> wgmmas;  // not yet waited for by this warp
    uint64_t issued_wgmmas = 0;
    uint32_t wgmma_groups = 0;
    const uint8_t* waits_for = nullptr;  // an mbarrier
    uint64_t cluster_phase = 0;  // barrier.cluster: the phase that it has arrived in, plus 1
    uint32_t cluster_lanes = 0;  // that have arrived in the current phase
  };
  OfWarp& of(const Warp& w) {
    if (warps_.empty()) warps_.resize(w.block().warps().size());
    return warps_[w.index()];
  }

  void add(Warp& w, const Copy& copy);
  // Runs the copies that wait_group(pending) of the lanes waits for.
  void wait_copies(Warp& w, uint32_t lanes, uint32_t pending);
  // Runs those issued before operation `id`; barriers: where the lanes report them, or null.
  void run_copies_before(Warp& w, uint32_t lanes, uint64_t id, uint8_t* const* barriers);

  void add(std::unique_ptr<BulkOperation> operation);
  void wait_bulk(Warp& w, uint32_t lanes, uint32_t pending, bool read_only);

  // Runs the wgmmas in all but the newest `pending` groups; false if another warp of the warpgroup has not issued its
  // part yet.
  bool wait_wgmmas(Warp& w, uint32_t pending);

  // barrier.cluster; the state of block 0 counts.
  uint64_t cluster_phase = 0;

  bool advance(Block& block) override;
  void finish(Block& block) override;

 private:
  bool is_awaited(Block& block, const BulkOperation& op) const;
  const BulkOperation* first_awaited(Block& block) const;
  void complete(BulkOperation& op);  // and signals
  void read(BulkOperation& op);
  void write(BulkOperation& op);

  std::vector<OfWarp> warps_;
  std::vector<std::unique_ptr<BulkOperation>> bulk_;
};

// Gives a deferred operation the lane that issued it: faults name it.
class AsLane {
 public:
  AsLane(Warp& w, int lane) : w_(w), exec_(w.exec) { w.exec = 1u << lane; }
  ~AsLane() { w_.exec = exec_; }
  AsLane(const AsLane&) = delete;
  AsLane& operator=(const AsLane&) = delete;

 private:
  Warp& w_;
  uint32_t exec_;
};

inline Async& async_of(const Warp& w) { return w.block().extension<Async>(); }

// An operation on an mbarrier at a host address, for `lane`; faults if it is none or the counts do not fit.
enum class Signal : uint8_t {
  arrive,
  arrive_drop,
  arrive_no_complete,
  arrive_copies,  // by cp.async.mbarrier.arrive
  expect,
  complete,
};  // fmt: skip
// Returns the state before.
uint64_t signal(Warp& w, const Instr& in, int lane, uint8_t* barrier, Signal what, int64_t count,
                int64_t bytes = 0);
void run_wgmma(Warp& w, const Wgmma& op);

}  // namespace tw::vgpu
