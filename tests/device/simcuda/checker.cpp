#include "checker.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace sim {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

void join(Clock& into, const Clock& other) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
}

}  // namespace

Checker& Checker::get() {
  static auto* made = new Checker();  // never destroyed: tensors outlive static objects
  return *made;
}

Checker::Checker() : host_(kMaxStreams, 0) {
  for (int device = 0; device < kDevices; ++device) new_stream(device);  // default streams
}

int Checker::new_stream(int device) {
  Lock lock(lock_);
  if (streams_.size() == kMaxStreams) throw std::runtime_error("simcuda: too many streams");
  streams_.emplace_back(kMaxStreams, 0);
  returned_.emplace_back(kMaxStreams);
  device_of_.push_back(device);
  done_.push_back(0);
  busy_.push_back(0);
  return static_cast<int>(streams_.size()) - 1;
}

int Checker::device_of(int stream) {
  Lock lock(lock_);
  return device_of_[stream];
}

Op Checker::book(const std::string& name, int stream) {
  const int site = site_ ? site_() : -1;
  Lock lock(lock_);
  auto [found, made] = name_ids_.emplace(name, static_cast<int>(names_.size()));
  if (made) names_.push_back(name);
  join(streams_[stream], host_);  // what the host knows to be over was over when it issued this
  busy(stream, per_op_);
  return {stream, found->second, site, ++streams_[stream][stream]};
}

void Checker::access(const Op& op, uintptr_t low, uintptr_t high, bool write) {
  if (op.at == 0 || high <= low) return;
  Lock lock(lock_);
  auto found = blocks_.upper_bound(low);
  if (found == blocks_.begin()) return;
  Block& block = (--found)->second;
  if (low >= block.high) return;
  const Access now{low, high, op, write};
  check_reuse(block, op);
  check_conflicts(block, now);
  // An access inside this one need not be kept where whatever conflicts with it conflicts with
  // this one too: this one is ordered after it, or the pair was reported.
  const auto covered = [&](const Access& old) {
    const bool inside = low <= old.low && old.high <= high;
    return inside && (write || (!old.write && old.op.stream == op.stream));
  };
  block.seen.erase(std::remove_if(block.seen.begin(), block.seen.end(), covered), block.seen.end());
  block.seen.push_back(now);
}

// As torch's caching allocator: a freed block may be given out again, to work on the stream that it
// was allocated on. Whether sizes match is luck, so a new block may be any that the pool got back.
void Checker::check_reuse(Block& block, const Op& op) {
  if (!block.fresh) return;
  block.fresh = false;
  for (size_t other = 0; other < streams_.size(); ++other) {
    const Op& last = returned_[block.pool][other];
    if (static_cast<int>(other) != op.stream && last.at > streams_[op.stream][other])
      report("reuse of freed memory", op, last);
  }
}

void Checker::check_conflicts(const Block& block, const Access& now) {
  for (const Access& old : block.seen) {
    if (old.high <= now.low || now.high <= old.low || !(now.write || old.write)) continue;
    if (old.op.stream == now.op.stream) continue;
    if (old.op.at <= streams_[now.op.stream][old.op.stream]) continue;
    report(!now.write ? "read after write" : old.write ? "write after write" : "write after read",
           now.op, old.op);
  }
}

void Checker::report(const std::string& kind, const Op& op, const Op& earlier) {
  std::ostringstream text;
  text << kind << ": " << names_[op.name] << " [site " << op.site << "] on stream " << op.stream
       << " is not ordered after " << names_[earlier.name] << " [site " << earlier.site
       << "] on stream " << earlier.stream;
  if (reported_.insert(text.str()).second && races_.size() < 400) races_.push_back(text.str());
}

void Checker::busy(int stream, double us) {
  Lock lock(lock_);
  done_[stream] = std::max(done_[stream], host_time_) + us;
  busy_[stream] += us;
}

void Checker::work(int stream, double bytes, double flops) {
  busy(stream, bytes * per_byte_ + flops * per_flop_);
}

void Checker::allocated(uintptr_t low, size_t nbytes, int stream) {
  Lock lock(lock_);
  blocks_[low] = {low, low + nbytes, stream, true, {}, {}};
}

void Checker::freed(uintptr_t low) {
  Lock lock(lock_);
  const auto found = blocks_.find(low);
  if (found == blocks_.end()) return;
  const Block& block = found->second;
  for (const Access& old : block.seen) {
    if (block.recorded.count(old.op.stream)) continue;
    Op& last = returned_[block.pool][old.op.stream];
    if (old.op.at > last.at) last = old.op;
  }
  blocks_.erase(found);
}

void Checker::record_stream(uintptr_t low, int stream) {
  Lock lock(lock_);
  const auto found = blocks_.find(low);
  if (found == blocks_.end()) return;
  found->second.recorded.insert(stream);
  ++counts_[1]["record_stream"];
}

void Checker::record(Event& event, int stream) {
  Lock lock(lock_);
  join(streams_[stream], host_);
  event = {streams_[stream], true, done_[stream]};
}

void Checker::block(const Event& event, int stream) {
  Lock lock(lock_);
  if (!event.recorded) return;
  join(streams_[stream], event.clock);
  done_[stream] = std::max(done_[stream], event.time_us);
}

// Whether a query says "over": the device may be far behind the host, or have caught up.
bool Checker::known(const Clock& clock) {
  ++counts_[2]["query"];
  if (!reached(clock)) return false;
  bool over = true;
  for (size_t i = 0; i < clock.size(); ++i) over &= clock[i] <= host_[i];
  if (over) return true;
  if (query_mode_ == 0 || (query_mode_ == 2 && (coin_() & 1))) return false;
  join(host_, clock);
  return true;
}

bool Checker::over(const Event& event) {
  Lock lock(lock_);
  return !event.recorded || known(event.clock);
}

bool Checker::over(int stream) {
  Lock lock(lock_);
  return known(streams_[stream]);
}

void Checker::host_knows(const Clock& clock, const std::string& why) {
  ++counts_[0][why];
  for (size_t i = 0; i < streams_.size(); ++i)
    if (clock[i] > host_[i]) host_time_ = std::max(host_time_, done_[i]);
  join(host_, clock);
}

void Checker::stall(int (*wait)()) {
  Lock lock(lock_);
  stalled_ = wait;
  reached_.assign(kMaxStreams, 0);
  for (size_t i = 0; i < streams_.size(); ++i) reached_[i] = streams_[i][i];
}

bool Checker::reached(const Clock& clock) {
  bool all = true;
  if (stalled_ != nullptr)
    for (size_t i = 0; i < clock.size(); ++i) all &= clock[i] <= reached_[i];
  return all;
}

// Without the lock, as others abort what this waits for.
void Checker::await(const Clock& clock) {
  int (*wait)() = nullptr;
  {
    Lock lock(lock_);
    if (!reached(clock)) wait = stalled_;
  }
  if (wait != nullptr) wait();
}

void Checker::host_waits(const Event& event, const char* why) {
  if (event.recorded) await(event.clock);
  Lock lock(lock_);
  if (event.recorded) host_knows(event.clock, why);
}

void Checker::host_waits(int stream, const char* why) {
  Clock clock;
  {
    Lock lock(lock_);
    clock = streams_[stream];
  }
  await(clock);
  Lock lock(lock_);
  host_knows(clock, why);
}

void Checker::host_waits_for_device(int device) {
  Clock all(kMaxStreams, 0);
  {
    Lock lock(lock_);
    for (size_t i = 0; i < streams_.size(); ++i)
      if (device_of_[i] == device) join(all, streams_[i]);
  }
  await(all);
  Lock lock(lock_);
  host_knows(all, "device.synchronize");
}

void Checker::reset() {
  Lock lock(lock_);
  races_.clear();
  reported_.clear();
  for (auto& counts : counts_) counts.clear();
}

std::string Checker::text(int which) {
  Lock lock(lock_);
  std::ostringstream text;
  if (which == 0)
    for (const auto& race : races_) text << race << "\n";
  else
    for (const auto& [why, times] : counts_[which - 1])
      text << times << "\t" << why << "\n";
  return text.str();
}

double Checker::time_us(int stream, int which) {
  Lock lock(lock_);
  return which == 0 ? done_[stream] : busy_[stream];
}

void Checker::answer_queries(int mode, int seed) {
  Lock lock(lock_);
  query_mode_ = mode;
  coin_.seed(seed);
}

void Checker::costs(double per_op_us, double per_byte_us, double per_flop_us) {
  Lock lock(lock_);
  per_op_ = per_op_us, per_byte_ = per_byte_us, per_flop_ = per_flop_us;
}

}  // namespace sim

// What Python calls, through ctypes.
extern "C" {

using sim::Checker;

void sim_reset() { Checker::get().reset(); }
void sim_stall(int (*wait)()) { Checker::get().stall(wait); }
void sim_trace(int (*site)()) { Checker::get().trace(site); }
void sim_answer_queries(int mode, int seed) { Checker::get().answer_queries(mode, seed); }
double sim_time(int64_t stream, int which) { return Checker::get().time_us(stream, which); }
void sim_busy(int64_t stream, double us) { Checker::get().busy(static_cast<int>(stream), us); }
void sim_costs(double per_op_us, double per_byte_us, double per_flop_us) {
  Checker::get().costs(per_op_us, per_byte_us, per_flop_us);
}

// One op that reads some ranges and writes others: `ranges` are pairs of first byte and length.
void sim_op(const char* name, int64_t stream, const uint64_t* ranges, int reads, int writes) {
  const sim::Op op = Checker::get().book(name, static_cast<int>(stream));
  for (int i = 0; i < reads + writes; ++i)
    Checker::get().access(op, ranges[2 * i], ranges[2 * i] + ranges[2 * i + 1], i >= reads);
}

size_t sim_text(int which, char* out, size_t room) {
  const std::string found = Checker::get().text(which);
  if (out != nullptr && room > found.size()) found.copy(out, room), out[found.size()] = 0;
  return found.size();
}

}  // extern "C"
