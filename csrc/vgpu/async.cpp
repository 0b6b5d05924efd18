// When asynchronous work runs, and what it does to memory (async.h).
#include "vgpu/async.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "vgpu/lanes.h"
#include "vgpu/tensor.h"

namespace tw::vgpu {

using ptx::Space;

// ---- cp.async

static void run_copy(const Copy& c, uint32_t lanes) {
  const auto copy = [&](int l) {
    const uint32_t size = c.size[static_cast<size_t>(l)];
    uint8_t* to = c.to[static_cast<size_t>(l)];
    if (size == 16) [[likely]] {
      std::memcpy(to, c.from[static_cast<size_t>(l)], 16);
    } else {
      if (size) std::memcpy(to, c.from[static_cast<size_t>(l)], size);
      std::memset(to + size, 0, c.bytes - size);
    }
  };
  for_lanes(lanes, copy);
}

// Tells the observer that cp.async of these lanes has been issued or is done; barriers: where each lane reports it, or null.
static void observe_copy(Warp& w, const Copy& c, uint32_t lanes, bool done,
                         uint8_t* const* barriers) {
  Observer* const observer = w.block().observer();
  if (!observer) return;
  AsyncAccess access;
  access.kind = AsyncAccess::Kind::copy;
  access.done = done;
  access.block = &w.block();
  access.bytes = c.bytes;
  for_lanes(lanes, [&](int l) {
    const auto address = static_cast<uint32_t>(c.to[static_cast<size_t>(l)] - w.block().shared());
    access.id = c.id + static_cast<uint64_t>(l);
    access.address = &address;
    access.mbarrier = barriers ? barriers[l] : nullptr;
    observer->async(w, *c.in, l, access);
  });
}

// Takes the lanes `due(copy)` off the copies and runs them.
template<class Due>
static void run_due(Warp& w, std::vector<Copy>& copies, uint8_t* const* barriers, Due due) {
  size_t kept = 0;
  for (Copy& c : copies) {
    const uint32_t lanes = due(c) & c.lanes;
    if (lanes) {
      run_copy(c, lanes);
      observe_copy(w, c, lanes, true, barriers);
    }
    c.lanes &= ~lanes;
    if (!c.lanes) continue;
    if (&copies[kept] != &c) copies[kept] = c;
    ++kept;
  }
  copies.resize(kept);
}

void Async::add(Warp& w, const Copy& copy) {
  observe_copy(w, copy, copy.lanes, false, nullptr);
  of(w).copies.push_back(copy);
}

void Async::wait_copies(Warp& w, uint32_t lanes, uint32_t pending) {
  OfWarp& mine = of(w);
  if (mine.copies.empty()) return;
  const auto& groups = mine.copy_groups;
  run_due(w, mine.copies, nullptr, [&](const Copy& c) {
    uint32_t due = 0;
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t committed = groups[static_cast<size_t>(l)];
      due |= static_cast<uint32_t>(committed > c.group && committed - c.group > pending) << l;
    }
    return due & lanes;
  });
}
void Async::run_copies_before(Warp& w, uint32_t lanes, uint64_t id, uint8_t* const* barriers) {
  run_due(w, of(w).copies, barriers, [&](const Copy& c) { return c.id < id ? lanes : 0; });
}

// ---- bulk copies

namespace {

uint8_t* global_range(const BulkOperation& op, Intent intent, uint64_t address, uint64_t bytes) {
  return resolve_range(*op.warp, *op.in, Space::global, intent, bytes, 1, address);
}

// Shows the observer a range of global memory that the operation reads or writes now.
void observe_global(const BulkOperation& op, const uint8_t* host, uint64_t bytes, bool store) {
  Observer* const observer = op.warp->block().observer();
  if (!observer || !bytes) return;
  uint64_t address[kLanes] = {};
  uint8_t* hosts[kLanes] = {};
  address[op.lane] = reinterpret_cast<uint64_t>(host);
  hosts[op.lane] = const_cast<uint8_t*>(host);
  Access access;
  access.load = !store || op.reduces;
  access.store = store;
  access.relaxed = op.reduces;
  access.async_proxy = true;
  access.bytes = static_cast<uint32_t>(bytes);
  access.lanes = uint32_t{1} << op.lane;
  access.address = address;
  access.host = hosts;
  access.space = Space::global;
  observer->access(*op.warp, *op.in, access);
}

// Joins the runs of a stored box to lines for observe_global.
class GlobalLine {
 public:
  explicit GlobalLine(const BulkOperation& op) : op_(op) {}
  void extend(const uint8_t* at, uint64_t bytes) {
    if (at != begin_ + bytes_) {
      finish();
      begin_ = at;
    }
    bytes_ += bytes;
  }
  void finish() {
    observe_global(op_, begin_, bytes_, true);
    bytes_ = 0;
  }

 private:
  const BulkOperation& op_;
  const uint8_t* begin_ = nullptr;
  uint64_t bytes_ = 0;
};

// Tells the observer which shared memory the operation will read or write, or has.
void observe_shared(const BulkOperation& op, AsyncAccess::Kind kind, bool done, Block& block,
                    uint32_t address, const uint8_t* barrier) {
  Observer* const observer = op.warp->block().observer();
  if (!observer) return;
  AsyncAccess access;
  access.kind = kind;
  access.done = done;
  access.id = op.id;
  access.block = &block;
  access.address = &address;
  access.bytes = static_cast<uint32_t>(op.bytes);
  access.mbarrier = barrier;
  observer->async(*op.warp, *op.in, op.lane, access);
}

// The 16-byte chunk at a shared address of a block.
uint8_t* shared_chunk(const BulkOperation& op, const Block& block, uint32_t address) {
  if (address + 16 > block.shared_end())
    op.warp->fault(Fault::Kind::memory, *op.in, op.lane,
                   "shared memory: a box reaches out of bounds at " + hex(address), address);
  return block.shared() + address;
}

}  // namespace

void Async::add(std::unique_ptr<BulkOperation> operation) {
  BulkOperation& op = *operation;
  op.id = of(*op.warp).operations++;
  for (const BulkOperation::Target& t : op.targets)
    observe_shared(op, AsyncAccess::Kind::load, false, *t.block, t.shared, nullptr);
  if (op.grouped)
    observe_shared(op, AsyncAccess::Kind::store, false, op.warp->block(), op.shared, nullptr);
  bulk_.push_back(std::move(operation));
}

void Async::complete(BulkOperation& op) {
  const AsLane as(*op.warp, op.lane);
  Warp& w = *op.warp;
  switch (op.kind) {
    case BulkOperation::Kind::load:
    case BulkOperation::Kind::load_tensor:
    case BulkOperation::Kind::store_values:
      for (const BulkOperation::Target& t : op.targets) {
        if (op.kind == BulkOperation::Kind::load_tensor)
          load_box(
              op.map, op.coordinates.data(), t.shared,
              [&](uint64_t address, uint64_t bytes) {
                const uint8_t* from = global_range(op, Intent::load, address, bytes);
                if (&t == op.targets.data()) observe_global(op, from, bytes, false);
                return from;
              },
              [&](uint32_t address) { return shared_chunk(op, *t.block, address); });
        else if (op.reduces)
          reduce(op.type, op.reduction, t.data, op.source ? op.source : op.values.data(), op.bytes);
        else
          std::memcpy(t.data, op.source ? op.source : op.values.data(), op.bytes);
        ++t.block->progress;
      }
      if (op.kind == BulkOperation::Kind::load && op.global_source)
        observe_global(op, op.source, op.bytes, false);
      for (const BulkOperation::Target& t : op.targets)
        observe_shared(op, AsyncAccess::Kind::load, true, *t.block, t.shared, t.barrier);
      for (const BulkOperation::Target& t : op.targets)
        signal(w, *op.in, op.lane, t.barrier, Signal::complete, 0, static_cast<int64_t>(op.bytes));
      return;
    case BulkOperation::Kind::store:
    case BulkOperation::Kind::store_tensor:
      read(op);
      return write(op);
    case BulkOperation::Kind::arrive_copies:
      run_copies_before(w, op.lanes, op.id, op.barriers.data());
      for_lanes(op.lanes, [&](int l) {
        signal(w, *op.in, l, op.barriers[static_cast<size_t>(l)], Signal::arrive_copies, 1);
      });
      return;
  }
}

// A store has two halves: its source may be reused after the first.
void Async::read(BulkOperation& op) {
  if (op.was_read) return;
  op.was_read = true;
  Block& block = op.warp->block();
  observe_shared(op, AsyncAccess::Kind::store, true, block, op.shared, nullptr);
  if (op.kind == BulkOperation::Kind::store) {
    op.values.assign(block.shared() + op.shared, block.shared() + op.shared + op.bytes);
    return;
  }
  op.values.clear();
  store_box(
      op.map, op.coordinates.data(), op.shared,
      [&](uint32_t address) { return shared_chunk(op, block, address); },
      [&](uint64_t, const uint8_t* from, uint32_t bytes) {
        op.values.insert(op.values.end(), from, from + bytes);
      });
}
void Async::write(BulkOperation& op) {
  const AsLane as(*op.warp, op.lane);
  const auto put = [&](uint8_t* to, const uint8_t* from, uint64_t bytes) {
    if (op.reduces)
      reduce(op.type, op.reduction, to, from, bytes);
    else
      std::memcpy(to, from, bytes);
  };
  const Intent intent = op.reduces ? Intent::atomic : Intent::store;
  if (op.kind == BulkOperation::Kind::store) {
    observe_global(op, op.destination, op.bytes, true);
    put(op.destination, op.values.data(), op.bytes);
  } else {
    const uint8_t* from = op.values.data();
    GlobalLine line(op);
    store_box(
        op.map, op.coordinates.data(), op.shared, [&](uint32_t) { return from; },
        [&](uint64_t address, const uint8_t*, uint32_t bytes) {
          uint8_t* to = global_range(op, intent, address, bytes);
          line.extend(to, bytes);
          put(to, from, bytes);
          from += bytes;
        });
    line.finish();
  }
  ++op.warp->block().progress;
}

void Async::wait_bulk(Warp& w, uint32_t lanes, uint32_t pending, bool read_only) {
  const auto& groups = of(w).bulk_groups;
  for (auto& op : bulk_) {
    if (!op->grouped || op->warp != &w || !(lanes >> op->lane & 1)) continue;
    const uint32_t committed = groups[static_cast<size_t>(op->lane)];
    if (committed <= op->group || committed - op->group <= pending) continue;
    const AsLane as(w, op->lane);
    read(*op);
    if (read_only) continue;
    write(*op);
    op.reset();
  }
  std::erase_if(bulk_, [](const auto& op) { return !op; });
}

// ---- when nobody can go on

bool Async::is_awaited(Block& block, const BulkOperation& op) const {
  Cluster& cluster = block.cluster();
  for (uint32_t r = 0; r < cluster.size(); ++r) {
    const Async* other = cluster.block(r).find_extension<Async>();
    if (!other) continue;
    for (const OfWarp& warp : other->warps_) {
      if (!warp.waits_for) continue;
      for (const BulkOperation::Target& t : op.targets)
        if (t.barrier == warp.waits_for) return true;
      if (op.kind == BulkOperation::Kind::arrive_copies)
        for (uint32_t left = op.lanes; left; left &= left - 1)
          if (op.barriers[static_cast<size_t>(std::countr_zero(left))] == warp.waits_for)
            return true;
    }
  }
  return false;
}
const BulkOperation* Async::first_awaited(Block& block) const {
  for (const auto& op : bulk_)
    if (is_awaited(block, *op)) return op.get();
  return nullptr;
}

bool Async::advance(Block& block) {
  if (bulk_.empty()) return false;
  std::vector<std::unique_ptr<BulkOperation>> due;
  const auto take = [&](auto wanted) {
    for (auto& op : bulk_)
      if (wanted(*op)) due.push_back(std::move(op));
    std::erase_if(bulk_, [](const auto& op) { return !op; });
  };
  if (first_awaited(block)) {
    take([&](const BulkOperation& op) { return is_awaited(block, op); });
  } else {
    // Whoever is awaited goes first, in the whole cluster; then the oldest.
    Cluster& cluster = block.cluster();
    for (uint32_t r = 0; r < cluster.size(); ++r) {
      const Async* other = cluster.block(r).find_extension<Async>();
      if (other && other != this && other->first_awaited(cluster.block(r))) return false;
    }
    const BulkOperation* oldest = bulk_.front().get();
    take([&](const BulkOperation& op) { return &op == oldest; });
  }
  for (auto& op : due) complete(*op);
  ++block.progress;
  return true;
}

void Async::finish(Block&) {
  for (auto& op : bulk_) complete(*op);
  bulk_.clear();
}

}  // namespace tw::vgpu
