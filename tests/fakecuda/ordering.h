// What is ordered before what: streams, events and the host as vector clocks, and the last accesses
// of each range of device memory. An access that is not ordered after a conflicting one is a race.
//
// Each stream runs at once what it is given, but copies between pinned memory and the device wait
// until something waits for them: a host that reads too early finds 0xff, and one that overwrites
// the source too early sends the wrong bytes.
#pragma once
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace emulated {

using Name = std::intptr_t;  // of a stream: its handle; -1 - device for the default one
using Clock = std::map<Name, long>;
constexpr Name kHost = INTPTR_MIN;

inline void join(Clock& mine, const Clock& other) {
  for (auto& [name, time] : other) mine[name] = std::max(mine[name], time);
}

struct Copy {
  long number;
  char* to;
  const char* from;  // null: the bytes are held, as they were when the copy was issued
  std::size_t size;
  std::vector<char> held;
};

struct Stream {
  Clock clock;
  long issued = 0;
  std::deque<Copy> open;
};

struct Event {
  Name stream = kHost;
  long number = 0;
  int asked = 0;
  double ms = 0;
  Clock clock;
};

struct Access {
  Name stream;
  long time;
  long site;  // where in Python; see `emulated.py`
};

struct Range {
  std::uintptr_t end;
  bool written = false;
  Access write{};
  std::map<Name, Access> reads;
};

class Order {
 public:
  std::recursive_mutex lock;

  // Something is issued on a stream: all before it in the stream is done.
  Stream& issue(Name name) {
    Stream& stream = streams_[name];
    finish(stream, stream.issued);
    tick(name, stream);
    return stream;
  }

  // A copy that is done when something waits for it.
  void issue_late(Name name, void* to, const void* from, std::size_t size, bool to_host) {
    Stream& stream = streams_[name];
    Copy copy{0, static_cast<char*>(to), static_cast<const char*>(from), size, {}};
    if (to_host) {
      finish(stream, stream.issued);
      copy.held.assign(copy.from, copy.from + size);
      copy.from = nullptr;
      std::memset(to, 0xff, size);
    }
    tick(name, stream);
    copy.number = stream.issued;
    stream.open.push_back(std::move(copy));
  }

  void record(Event& event, Name name) {
    Stream& stream = streams_[name];
    tick(name, stream);
    event.stream = name, event.number = stream.issued, event.asked = 0, event.clock = stream.clock;
  }

  void stream_waits(Name name, const Event& event) {
    finish(streams_[event.stream], event.number);
    join(streams_[name].clock, event.clock);
  }

  void host_waits(const Event& event) {
    finish(streams_[event.stream], event.number);
    join(host_, event.clock);
  }

  void host_waits(Name name) {
    Stream& stream = streams_[name];
    finish(stream, stream.issued);
    join(host_, stream.clock);
  }

  void host_waits_for_all() {
    for (auto& [name, stream] : streams_) host_waits(name);
  }

  // Whether all before the event is done: not when it is asked for the first time.
  bool is_done(Event& event) {
    bool open = false;
    for (auto& copy : streams_[event.stream].open) open |= copy.number <= event.number;
    if (open && !event.asked++) return false;
    host_waits(event);
    return true;
  }

  // An access of `size` bytes by what was issued last on a stream.
  void access(Name name, const void* place, std::size_t size, bool writes, long site) {
    if (!size) return;
    auto start = reinterpret_cast<std::uintptr_t>(place), end = start + size;
    split(start), split(end);
    Stream& stream = streams_[name];
    Access own{name, stream.issued, site};
    for (std::uintptr_t at = start; at < end;) {
      auto found = ranges_.lower_bound(at);
      std::uintptr_t next = found == ranges_.end() ? end : std::min(found->first, end);
      if (at < next) {
        found = ranges_.emplace(at, Range{next}).first;
      }
      Range& range = found->second;
      if (range.written) check(stream, own, range.write, writes ? "write after write" : "read after write");
      if (writes) {
        for (auto& [_, read] : range.reads) check(stream, own, read, "write after read");
        range.reads.clear(), range.written = true, range.write = own;
      } else {
        range.reads[name] = own;
      }
      at = range.end;
    }
  }

  void forget(const void* place, std::size_t size) {
    auto start = reinterpret_cast<std::uintptr_t>(place);
    split(start), split(start + size);
    ranges_.erase(ranges_.lower_bound(start), ranges_.lower_bound(start + size));
  }

  struct Race {
    const char* kind;
    long site, other;
  };
  std::deque<Race> races;

 private:
  void tick(Name name, Stream& stream) {
    join(stream.clock, host_);
    stream.clock[name] = ++stream.issued;
  }

  void finish(Stream& stream, long number) {
    while (!stream.open.empty() && stream.open.front().number <= number) {
      Copy& copy = stream.open.front();
      std::memmove(copy.to, copy.from ? copy.from : copy.held.data(), copy.size);
      stream.open.pop_front();
    }
  }

  void check(const Stream& stream, const Access& own, const Access& other, const char* kind) {
    if (other.stream == own.stream) return;
    auto known = stream.clock.find(other.stream);
    if (known == stream.clock.end() || known->second < other.time) {
      races.push_back({kind, own.site, other.site});
    }
  }

  void split(std::uintptr_t at) {
    auto next = ranges_.lower_bound(at);
    if (next == ranges_.begin()) return;
    auto found = std::prev(next);
    if (found->first == at || found->second.end <= at) return;
    Range rest = found->second;
    found->second.end = at;
    ranges_.emplace(at, std::move(rest));
  }

  std::map<Name, Stream> streams_;
  Clock host_;
  std::map<std::uintptr_t, Range> ranges_;
};

}  // namespace emulated
