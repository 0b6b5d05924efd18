#include "vgpu/control_flow.h"

#include <algorithm>

namespace tw::vgpu {

namespace {

constexpr uint32_t kNowhere = 0xffffffff;

struct BasicBlock {
  uint32_t first, last;                  // instructions [first, last]
  std::vector<uint32_t> next, previous;  // blocks
  std::vector<uint32_t> out;             // blocks that would be in `next` but do nothing but exit
  bool exits = false;                    // does nothing but exit
};

// Paths to blocks that only exit count for the blocks that have no other way to an end: those of a loop
// that the kernel ends with.
void keep_last_ways_out(std::vector<BasicBlock>& blocks) {
  std::vector<bool> ends(blocks.size(), false);
  std::vector<uint32_t> ahead;
  for (uint32_t i = 0; i < blocks.size(); ++i)
    if (blocks[i].next.empty()) ahead.push_back(i);
  while (!ahead.empty()) {
    const uint32_t at = ahead.back();
    ahead.pop_back();
    if (ends[at]) continue;
    ends[at] = true;
    ahead.insert(ahead.end(), blocks[at].previous.begin(), blocks[at].previous.end());
  }
  for (uint32_t i = 0; i < blocks.size(); ++i) {
    if (ends[i]) continue;
    for (const uint32_t to : blocks[i].out) {
      blocks[i].next.push_back(to);
      blocks[to].previous.push_back(i);
    }
  }
}

std::vector<BasicBlock> basic_blocks(const std::vector<Flow>& flow) {
  const auto n = static_cast<uint32_t>(flow.size());
  std::vector<bool> leader(n + 1, false);
  leader[0] = true;
  for (uint32_t i = 0; i < n; ++i) {
    if (flow[i].kind == Flow::Kind::plain) continue;
    leader[i + 1] = true;
    for (const uint32_t t : flow[i].targets) leader[t] = true;
  }
  std::vector<BasicBlock> blocks;
  std::vector<uint32_t> block_of(n, 0);
  for (uint32_t i = 0; i < n; ++i) {
    if (leader[i]) blocks.push_back({i, i, {}, {}, {}, false});
    blocks.back().last = i;
    block_of[i] = static_cast<uint32_t>(blocks.size()) - 1;
  }
  const auto exits_at = [&](uint32_t i) {
    return flow[i].kind == Flow::Kind::exit && !flow[i].conditional;
  };
  for (BasicBlock& b : blocks) b.exits = exits_at(b.first);
  for (size_t i = blocks.size(); i-- > 0;) {
    BasicBlock& b = blocks[i];
    const Flow& end = flow[b.last];
    const auto add = [&](uint32_t instruction) {
      const uint32_t to = block_of[instruction];
      std::vector<uint32_t>& list = blocks[to].exits ? b.out : b.next;
      if (std::find(list.begin(), list.end(), to) == list.end()) list.push_back(to);
    };
    for (const uint32_t t : end.targets) add(t);
    if ((end.kind == Flow::Kind::plain || end.conditional) && b.last + 1 < n) add(b.last + 1);
  }
  for (uint32_t i = 0; i < blocks.size(); ++i)
    for (const uint32_t to : blocks[i].next) blocks[to].previous.push_back(i);
  keep_last_ways_out(blocks);
  return blocks;
}

// Immediate post-dominators by Cooper, Harvey and Kennedy's iteration ("A Simple, Fast Dominance
// Algorithm", 2001) on the reversed graph. Node `blocks.size()` is the virtual exit.
std::vector<uint32_t> post_dominators(const std::vector<BasicBlock>& blocks) {
  const auto exit = static_cast<uint32_t>(blocks.size());
  std::vector<uint32_t> order;  // post-order of the reversed graph
  std::vector<uint32_t> number(blocks.size() + 1, kNowhere);
  std::vector<bool> seen(blocks.size(), false);
  std::vector<std::pair<uint32_t, size_t>> stack;
  for (uint32_t root = 0; root < blocks.size(); ++root) {
    if (!blocks[root].next.empty() || seen[root]) continue;
    seen[root] = true;
    stack.push_back({root, 0});
    while (!stack.empty()) {
      auto& [at, child] = stack.back();
      if (child < blocks[at].previous.size()) {
        const uint32_t to = blocks[at].previous[child++];
        if (!seen[to]) {
          seen[to] = true;
          stack.push_back({to, 0});
        }
      } else {
        number[at] = static_cast<uint32_t>(order.size());
        order.push_back(at);
        stack.pop_back();
      }
    }
  }
  number[exit] = static_cast<uint32_t>(order.size());
  std::vector<uint32_t> parent(blocks.size() + 1, kNowhere);
  parent[exit] = exit;
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = order.size(); i-- > 0;) {
      const uint32_t at = order[i];
      uint32_t best = blocks[at].next.empty() ? exit : kNowhere;
      for (const uint32_t to : blocks[at].next) {
        if (parent[to] == kNowhere) continue;
        if (best == kNowhere) {
          best = to;
          continue;
        }
        uint32_t a = best, b = to;
        while (a != b) {
          while (number[a] < number[b]) a = parent[a];
          while (number[b] < number[a]) b = parent[b];
        }
        best = a;
      }
      if (best != parent[at]) {
        parent[at] = best;
        changed = true;
      }
    }
  }
  return parent;
}

}  // namespace

std::vector<uint32_t> join_points(const std::vector<Flow>& flow) {
  std::vector<uint32_t> joins(flow.size(), kNowhere);
  if (flow.empty()) return joins;
  const std::vector<BasicBlock> blocks = basic_blocks(flow);
  const std::vector<uint32_t> parent = post_dominators(blocks);
  for (uint32_t b = 0; b < blocks.size(); ++b)
    if (flow[blocks[b].last].kind == Flow::Kind::branch && parent[b] < blocks.size())
      joins[blocks[b].last] = blocks[parent[b]].first;
  return joins;
}

}  // namespace tw::vgpu
