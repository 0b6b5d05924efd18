#include "vgpu/grid.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "vgpu/global_races.h"

namespace tw::vgpu {

namespace {

constexpr size_t kMaxResident = 1024;  // clusters under way; no GPU holds many more
constexpr int kIdlePasses = 100;  // over all blocks at hand without any change: they wait for ever
constexpr auto kPatience =
    std::chrono::microseconds(200);  // before another block is started for those that wait

void check(const Program& program, const Launch& launch) {
  const auto fail = [&](const std::string& what) { throw LaunchError(program.name + ": " + what); };
  const auto shape = [](const uint32_t* n) {
    return "(" + std::to_string(n[0]) + ", " + std::to_string(n[1]) + ", " + std::to_string(n[2]) +
           ")";
  };
  for (int i = 0; i < 3; ++i) {
    if (!launch.grid[i] || !launch.block[i] || !launch.cluster[i]) fail("a launch dimension is 0");
    if (launch.block[i] > 1024)
      fail("block " + shape(launch.block) + " has more than 1024 threads");
    if (launch.grid[i] % launch.cluster[i])
      fail("grid " + shape(launch.grid) + " is not a multiple of the cluster " +
           shape(launch.cluster));
  }
  if (launch.grid[1] > 65535 || launch.grid[2] > 65535)
    fail("grid " + shape(launch.grid) + " exceeds 65535 in y or z");
  if (launch.threads_per_block() > 1024)
    fail("block " + shape(launch.block) + " has more than 1024 threads");
  const auto product = [](const uint32_t* n) { return uint64_t{n[0]} * n[1] * n[2]; };
  const ptx::Kernel& k = program.kernel;
  if (k.reqntid[0] && (k.reqntid[0] != launch.block[0] || k.reqntid[1] != launch.block[1] ||
                       k.reqntid[2] != launch.block[2]))
    fail("the kernel requires a block of " + shape(k.reqntid) + ", got " + shape(launch.block));
  if (k.maxntid[0] && launch.threads_per_block() > product(k.maxntid))
    fail("the kernel allows " + std::to_string(product(k.maxntid)) + " threads per block, got " +
         std::to_string(launch.threads_per_block()));
  if (k.cluster[0] && (k.cluster[0] != launch.cluster[0] || k.cluster[1] != launch.cluster[1] ||
                       k.cluster[2] != launch.cluster[2]))
    fail("the kernel requires a cluster of " + shape(k.cluster) + ", got " + shape(launch.cluster));
  if (product(launch.cluster) > 16) fail("a cluster has at most 16 blocks");
  constexpr uint32_t kMaxShared = 227 * 1024;
  const uint32_t shared =
      (launch.dynamic_shared ? program.dynamic_shared_base() : program.static_shared_end) -
      kSharedBase + launch.dynamic_shared;
  if (launch.dynamic_shared > kMaxShared || shared > kMaxShared + 1024)
    fail("the block would use " + std::to_string(shared) + " bytes of shared memory, at most " +
         std::to_string(kMaxShared) + " exist");
  if (launch.parameters.size() != k.parameter_bytes)
    fail("expected " + std::to_string(k.parameter_bytes) + " bytes of parameters, got " +
         std::to_string(launch.parameters.size()));
}

class Runner {
 public:
  Runner(const Program& program, const Launch& launch, unsigned threads)
      : program_(program),
        launch_(launch),
        clusters_(launch.blocks() / launch.blocks_per_cluster()),
        threads_(threads) {}

  LaunchResult run(const std::function<bool()>& interrupted);

 private:
  void work();
  void worker();

  const Program& program_;
  const Launch& launch_;
  const uint64_t clusters_;
  const unsigned threads_;
  std::atomic<uint64_t> next_{0};     // cluster to start
  std::atomic<uint64_t> changes_{0};  // turns of clusters that changed something
  std::atomic<unsigned> busy_{0};     // workers that do not only spin
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> instructions_{0};
  std::mutex mutex_;
  std::condition_variable done_;
  unsigned running_ = 0;
  std::exception_ptr error_;
};

// One thread: finishes the blocks it has before it starts others, unless they only wait.
void Runner::work() {
  std::deque<std::unique_ptr<Cluster>> waiting;  // started, and spinning
  std::vector<std::unique_ptr<Cluster>> free;
  int idle = 0;
  uint64_t seen = changes_;
  auto since = std::chrono::steady_clock::now();
  bool counted = true;
  const auto set_busy = [&](bool busy) {
    if (busy == counted) return;
    counted = busy;
    busy ? ++busy_ : --busy_;
  };
  size_t at = 0;
  while (!stop_) {
    std::unique_ptr<Cluster> cluster;
    // Those that wait go first. Another block is started when they have waited in vain for a while.
    const bool patient = busy_ > 1 && std::chrono::steady_clock::now() - since < kPatience;
    const bool start = waiting.empty() || (at >= waiting.size() && !patient &&
                                           waiting.size() < kMaxResident / threads_ + 1);
    if (start) {
      const uint64_t index = next_++;
      if (index < clusters_) {
        if (free.empty()) {
          cluster = std::make_unique<Cluster>(program_, launch_);
        } else {
          cluster = std::move(free.back());
          free.pop_back();
        }
        cluster->start(index);
        since = std::chrono::steady_clock::now();
      }
    }
    if (!cluster) {
      if (waiting.empty()) break;
      if (at >= waiting.size()) {
        at = 0;
        const uint64_t now = changes_;
        idle = now == seen ? idle + 1 : 0;
        seen = now;
        set_busy(idle < 2);
        if (idle >= kIdlePasses && busy_ == 0)
          waiting.front()->deadlock("all running blocks wait for something that nobody changes");
        if (busy_ > 0) std::this_thread::yield();
      }
      cluster = std::move(waiting[at]);
      waiting.erase(waiting.begin() + static_cast<ptrdiff_t>(at));
    }
    const uint64_t before = cluster->progress();
    const bool finished = cluster->run(stop_);
    if (finished || cluster->progress() != before) {
      ++changes_;
      set_busy(true);
      idle = 0;
    }
    if (finished) {
      instructions_ += cluster->instructions();
      free.push_back(std::move(cluster));
    } else {
      waiting.insert(waiting.begin() + static_cast<ptrdiff_t>(at), std::move(cluster));
      ++at;
    }
  }
  set_busy(false);
}

void Runner::worker() {
  try {
    work();
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
    stop_ = true;
  }
  const std::lock_guard lock(mutex_);
  --running_;
  done_.notify_all();
}

LaunchResult Runner::run(const std::function<bool()>& interrupted) {
  const auto start = std::chrono::steady_clock::now();
  const auto count = static_cast<unsigned>(std::min<uint64_t>(threads_, clusters_));
  running_ = count;
  busy_ = count;
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < count; ++i) threads.emplace_back([this] { worker(); });
  {
    std::unique_lock lock(mutex_);
    while (!done_.wait_for(lock, std::chrono::milliseconds(50), [this] { return running_ == 0; })) {
      lock.unlock();
      if (interrupted()) stop_ = true;
      lock.lock();
    }
  }
  for (std::thread& t : threads) t.join();
  if (error_) std::rethrow_exception(error_);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  return {instructions_, took.count()};
}

}  // namespace

LaunchResult run_grid(const Program& program, Launch& launch, unsigned threads,
                      const std::function<bool()>& interrupted) {
  check(program, launch);
  for (const GlobalVariable& v : program.memory->variables)
    launch.memory.add({reinterpret_cast<uint64_t>(v.data), v.bytes, v.constant});
  launch.memory.add(
      {reinterpret_cast<uint64_t>(launch.parameters.data()), launch.parameters.size(), true});
  launch.memory.finish();
  std::unique_ptr<GlobalRaces> races;
  if (launch.check == Check::global) races = std::make_unique<GlobalRaces>(program, launch);
  launch.global_races = races.get();
  if (launch.counters) launch.counters->start(launch.memory);
  return Runner(program, launch, threads).run(interrupted);
}

}  // namespace tw::vgpu
