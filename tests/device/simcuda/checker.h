// What CUDA orders and what it does not: vector clocks of streams, and accesses by byte range.
//
// Everything runs at once on the host, but each op, copy and collective is booked on a stream.
// Recording an event and waiting for it carry clocks from stream to stream exactly as CUDA orders
// work. So an access that CUDA does not order after an earlier conflicting one is reported, however
// the threads happened to run.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace sim {

constexpr int kDevices = 8;
constexpr int kMaxStreams = 256;
using Clock = std::vector<uint32_t>;  // by stream: how many of its ops are known to be over

struct Op {  // one op on a stream
  int stream = 0, name = 0, site = -1;
  uint32_t at = 0;  // its number on the stream; 0 if it is not booked
};

struct Event {
  Clock clock;
  bool recorded = false;
  double time_us = 0;
};

// Methods lock for themselves; none calls Python while it holds the lock.
class Checker {
 public:
  static Checker& get();

  int new_stream(int device);
  int device_of(int stream);

  // Ops. `book` asks Python for the line that issued the op, if `trace` was called.
  Op book(const std::string& name, int stream);
  void access(const Op& op, uintptr_t low, uintptr_t high, bool write);
  void work(int stream, double bytes, double flops);
  void busy(int stream, double us);

  // Memory, by the stream that it was allocated on.
  void allocated(uintptr_t low, size_t nbytes, int stream);
  void freed(uintptr_t low);
  void record_stream(uintptr_t low, int stream);

  // Events, and what makes the host wait.
  void record(Event& event, int stream);
  void block(const Event& event, int stream);
  bool over(const Event& event);
  bool over(int stream);
  void host_waits(const Event& event, const char* why);
  void host_waits(int stream, const char* why);
  void host_waits_for_device(int device);

  // From now on a device comes no further: what is booked later is not over. A host that waits for
  // it calls `wait` first, which returns once the device goes on. Null: it goes on.
  void stall(int (*wait)());

  // What was found, and the settings of a run.
  void reset();
  std::string text(int which);
  double time_us(int stream, int which);
  void trace(int (*site)()) { site_ = site; }  // a number for the line that issues an op
  void answer_queries(int mode, int seed);
  void costs(double per_op_us, double per_byte_us, double per_flop_us);

 private:
  struct Access {
    uintptr_t low, high;
    Op op;
    bool write;
  };
  struct Block {
    uintptr_t low, high;
    int pool;           // the stream it was allocated on
    bool fresh = true;  // not accessed since it was allocated
    std::vector<Access> seen;
    std::set<int> recorded;  // streams that the allocator waits for before it reuses the block
  };

  Checker();
  bool known(const Clock& clock);
  bool reached(const Clock& clock);
  void await(const Clock& clock);
  void host_knows(const Clock& clock, const std::string& why);
  void check_reuse(Block& block, const Op& op);
  void check_conflicts(const Block& block, const Access& now);
  void report(const std::string& kind, const Op& op, const Op& earlier);

  std::recursive_mutex lock_;
  std::vector<Clock> streams_;
  std::vector<int> device_of_;
  Clock host_;                            // what the host knows to be over
  std::map<uintptr_t, Block> blocks_;     // by their first byte
  std::vector<std::vector<Op>> returned_;  // [pool][stream]: last access of any block it got back
  std::vector<std::string> names_;
  std::unordered_map<std::string, int> name_ids_;
  std::vector<std::string> races_;
  std::set<std::string> reported_;
  std::map<std::string, int> counts_[3];  // host waits by cause, record_stream, queries
  int query_mode_ = 0;
  std::mt19937 coin_{0};
  int (*site_)() = nullptr;
  int (*stalled_)() = nullptr;
  Clock reached_;  // how far each stream came before
  // Modelled time in microseconds: when each stream is through, and how long it was busy.
  std::vector<double> done_, busy_;
  double host_time_ = 0, per_op_ = 0, per_byte_ = 0, per_flop_ = 0;
};

}  // namespace sim
