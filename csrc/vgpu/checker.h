// The checker: an observer of one cluster that finds what a run on hardware would only sometimes show.
//
// Shared memory: reads of what nobody wrote, data races, asynchronous data touched before its wait, and generic writes that the
// asynchronous proxy reads without a proxy fence. Registers of wgmma that are touched in flight. Global memory
// (option): data races between blocks.
//
// How: happens-before by vector clocks. A warp counts its intervals between synchronisations; it knows, for each other
// warp, the newest interval that is ordered before its own present. Barriers and mbarriers carry this knowledge from those that
// arrive to those that leave. Each mbarrier is also a clock of its own, which counts phases: data of a copy belongs to
// the phase that it completes, so only who has waited for that phase may touch it.
//   granule  the narrowest access of the kernel, 1 to 16 bytes: what the records below are kept for
//   cell     the last write of a granule: who, when, which lane, which instruction
//   reads    of each granule and warp: when it last read it, or that an asynchronous operation still does
// Lanes of a warp are ordered among themselves by bar.warp.sync and by barriers only, not by running in step.
// A wgmma is one operation of four warps: a wait by one of them is known to be the end of all its reads of shared memory,
// and passes on with barriers. Outside Check::strict two things pass that PTX forbids, but that compilers do and
// assemblers cope with: f16 accumulators unpacked before the wait, accumulators copied and A computed after wgmma.fence.
// A third passes with Launch::unfenced_copies alone: data of cp.async read by wgmma without a proxy fence. Triton 3.6
// emits no such fence where Triton 3.7 and later do; nothing else in the PTX tells the two apart, so a lost fence would be
// found only with false alarms on Triton 3.6.
// Atomic and volatile accesses do not race with each other. Two writes of the same value do not race: compilers emit
// replicated stores.
#pragma once
#include <cstdint>
#include <memory>

#include "vgpu/observer.h"

namespace tw::vgpu {

struct Launch;
struct Program;
class GlobalRaces;

enum class Check : uint8_t {
  off,
  on,
  strict,  // also what compilers are known to do to registers of wgmma, and assemblers cope with
  global,  // on, and data races between blocks in global memory
};

std::unique_ptr<Observer> make_checker(Cluster& cluster);

// The narrowest access to a memory in a kernel, as a power of two; at most 16 bytes.
enum class Memory : uint8_t { shared, global };
uint32_t granule_shift(const Program& program, Memory memory);

}  // namespace tw::vgpu
