// Clusters: barrier.cluster, mapa, getctarank. And what only steers the hardware or orders memory: proxy fences, setmaxnreg,
// griddepcontrol.
#include <atomic>

#include "vgpu/async.h"
#include "vgpu/lanes.h"
#include "vgpu/tensor.h"

namespace tw::vgpu {

using ptx::Space;

namespace {

// ---- barrier.cluster.arrive, barrier.cluster.wait: all threads of the cluster that have not exited

// Opens the barrier if everybody is in.
void try_open(Cluster& cluster) {
  bool any = false;
  for (uint32_t r = 0; r < cluster.size(); ++r) {
    Block& block = cluster.block(r);
    Async& async = block.extension<Async>();
    for (const Warp& w : block.warps()) {
      if (w.live & ~async.of(w).cluster_lanes) return;
      any |= async.of(w).cluster_lanes != 0;
    }
  }
  if (!any) return;
  if (Observer* observer = cluster.block(0).observer()) observer->cluster_open(cluster);
  for (uint32_t r = 0; r < cluster.size(); ++r) {
    Block& block = cluster.block(r);
    for (const Warp& w : block.warps()) block.extension<Async>().of(w).cluster_lanes = 0;
  }
  ++cluster.block(0).extension<Async>().cluster_phase;
  ++cluster.block(0).progress;
}

Status run_cluster_arrive(Warp& w, const Instr& in) {
  Async::OfWarp& mine = async_of(w).of(w);
  if (mine.cluster_lanes & w.exec)
    w.fault(Fault::Kind::barrier, in, -1,
            "barrier.cluster.arrive twice without a barrier.cluster.wait between them");
  if (Observer* observer = w.block().observer()) observer->cluster_arrive(w, in);
  mine.cluster_lanes |= w.exec;
  mine.cluster_phase = w.block().cluster().block(0).extension<Async>().cluster_phase + 1;
  try_open(w.block().cluster());
  return Status::next;
}
Status run_cluster_wait(Warp& w, const Instr& in) {
  Async::OfWarp& mine = async_of(w).of(w);
  if (!mine.cluster_phase)
    w.fault(Fault::Kind::barrier, in, -1, "barrier.cluster.wait without a barrier.cluster.arrive");
  const Async& first = w.block().cluster().block(0).extension<Async>();
  if (first.cluster_phase < mine.cluster_phase)
    try_open(w.block().cluster());  // warps may have exited
  if (first.cluster_phase < mine.cluster_phase) return Status::wait;
  if (Observer* observer = w.block().observer()) observer->cluster_leave(w, in);
  return Status::next;
}
std::string explain_cluster(Warp&, const Instr&) { return "the other threads of the cluster"; }

void decode_cluster_arrive(Decode& d) {
  d.expect_operands(0, 0);
  for (const char* word : {"release", "relaxed"}) d.take(word);
  if (d.take("aligned")) d.flag(Instr::kConverge);
  d.run(run_cluster_arrive, Class::barrier);
}
void decode_cluster_wait(Decode& d) {
  d.expect_operands(0, 0);
  d.take("acquire");
  if (d.take("aligned")) d.flag(Instr::kConverge);
  d.explain(explain_cluster);
  d.run(run_cluster_wait, Class::barrier);
}
const Opcode cluster_arrive("barrier.cluster.arrive", decode_cluster_arrive);
const Opcode cluster_wait("barrier.cluster.wait", decode_cluster_wait);

// ---- mapa, getctarank

uint64_t with_rank(uint64_t address, uint32_t rank) {
  return (address & ~(uint64_t{0xff} << kSharedRankShift)) | uint64_t{rank + 1} << kSharedRankShift;
}
template<class T>
Status run_mapa(Warp& w, const Instr& in) {
  const T* address = w.lanes<T>(in.op[1]);
  const uint32_t* rank = w.lanes<uint32_t>(in.op[2]);
  const uint32_t size = w.block().cluster().size();
  for_lanes(w.exec, [&](int l) {
    if (rank[l] >= size)
      w.fault(
          Fault::Kind::memory, in, l,
          "mapa: block " + std::to_string(rank[l]) + " of a cluster of " + std::to_string(size));
  });
  write_lanes<T>(w, in.op[0],
                 [&](int l) { return static_cast<T>(with_rank(address[l], rank[l])); });
  return Status::next;
}
template<class T>
Status run_getctarank(Warp& w, const Instr& in) {
  const T* address = w.lanes<T>(in.op[1]);
  const uint32_t own = w.block().rank();
  write_lanes<uint32_t>(w, in.op[0], [&](int l) {
    const uint32_t rank = static_cast<uint32_t>(address[l]) >> kSharedRankShift;
    return rank ? rank - 1 : own;
  });
  return Status::next;
}
int take_address_type(Decode& d) {
  d.take("shared::cluster");
  const int bits = d.take("u64") ? 64 : d.take("u32") ? 32 : 0;
  if (!bits) d.fail("expected .u32 or .u64");
  return bits;
}
void decode_mapa(Decode& d) {
  d.expect_operands(3, 3);
  const int bits = take_address_type(d);
  d.out.op[0] = d.destination(0, bits);
  d.out.op[1] = d.source(1, bits);
  d.out.op[2] = d.source(2, 32);
  d.run(bits == 64 ? run_mapa<uint64_t> : run_mapa<uint32_t>, Class::integer);
}
void decode_getctarank(Decode& d) {
  d.expect_operands(2, 2);
  const int bits = take_address_type(d);
  d.out.op[0] = d.destination(0, 32);
  d.out.op[1] = d.source(1, bits);
  d.run(bits == 64 ? run_getctarank<uint64_t> : run_getctarank<uint32_t>, Class::integer);
}
const Opcode mapa("mapa", decode_mapa);
const Opcode getctarank("getctarank", decode_getctarank);

// ---- fences between proxies, and of mbarrier.init

Status run_fence(Warp& w, const Instr& in) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (Observer* o = w.block().observer()) o->fence(w, in);
  return Status::next;
}
// pool: the tensor map that is acquired
Status run_map_fence(Warp& w, const Instr& in) {
  run_fence(w, in);
  if (Observer* o = w.block().observer())
    for_lanes(w.exec, [&](int lane) {
      const uint64_t map = pool_address(w, w.pool(in), Space::generic, lane);
      o->tensor_map(w, in, lane, reinterpret_cast<const uint8_t*>(map), MapUse::acquired);
    });
  return Status::next;
}
void decode_proxy_fence(Decode& d) {
  static constexpr const char* kWords[] = {"alias",
                                           "async",
                                           "async.global",
                                           "global",
                                           "shared::cta",
                                           "shared::cluster",
                                           "async::generic",
                                           "release",
                                           "sync_restrict::shared::cta",
                                           "sync_restrict::shared::cluster",
                                           "cta",
                                           "cluster",
                                           "gpu",
                                           "sys"};
  const bool map = d.take("tensormap::generic"), acquires = map && d.take("acquire");
  for (const char* word : kWords) d.take(word);
  if (acquires) {
    d.expect_operands(2, 2);
    push_address(d, 0, Space::generic);
    if (d.immediate(d.operand(1)) != 128) d.fail("expected a size of 128");
    d.run(run_map_fence, Class::fence);
    return;
  }
  for (size_t i = 0; i < d.operands(); ++i)
    if (d.operand(i).kind != ptx::Operand::Kind::address &&
        d.operand(i).kind != ptx::Operand::Kind::integer)
      d.fail("unexpected operand");
  d.run(run_fence, Class::fence);
}
void decode_init_fence(Decode& d) {
  d.expect_operands(0, 0);
  if (!d.take("release") || !d.take("cluster")) d.fail("expected .release.cluster");
  d.run(run_fence, Class::fence);
}
const Opcode proxy_fence("fence.proxy", decode_proxy_fence);
const Opcode init_fence("fence.mbarrier_init", decode_init_fence);

// ---- hints that change nothing a program can see

Status run_nothing(Warp&, const Instr&) { return Status::next; }

void decode_setmaxnreg(Decode& d) {
  d.expect_operands(1, 1);
  if (!d.take("inc") && !d.take("dec")) d.fail("expected .inc or .dec");
  if (!d.take("sync") || !d.take("aligned") || !d.take("u32")) d.fail("expected .sync.aligned.u32");
  const uint64_t count = d.immediate(d.operand(0));
  if (count < 24 || count > 256 || count % 8)
    d.fail("setmaxnreg: the count must be a multiple of 8 from 24 to 256");
  d.flag(Instr::kConverge);
  d.run(run_nothing, Class::other);
}
// Launches run one after the other, so what came before is complete.
void decode_griddepcontrol(Decode& d) {
  d.expect_operands(0, 0);
  if (!d.take("launch_dependents") && !d.take("wait"))
    d.fail("expected .launch_dependents or .wait");
  d.run(run_nothing, Class::other);
}
const Opcode setmaxnreg("setmaxnreg", decode_setmaxnreg);
const Opcode griddepcontrol("griddepcontrol", decode_griddepcontrol);

}  // namespace
}  // namespace tw::vgpu
