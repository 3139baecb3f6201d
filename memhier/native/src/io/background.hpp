// Jobs on a thread of their own, one after the other; it starts with the first.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>

#include "io/worker.hpp"

namespace memhier {

class Background {
 public:
  struct Job {
    std::function<void()> work;  // throws nothing
    std::atomic<bool> done = false;
  };

  ~Background() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    posted_.notify_one();
    worker_.reset();
  }

  bool made_here() const { return owner_ == ::getpid(); }
  std::size_t memory_bytes() const { return worker_ ? Worker::kTouchedBytes : 0; }

  // The caller keeps the job until it is done.
  void post(Job& job) {
    {
      const std::lock_guard lock(mutex_);
      if (!worker_) worker_.emplace([](void* self) { static_cast<Background*>(self)->run(); }, this);
      jobs_.push_back(&job);
    }
    posted_.notify_one();
  }

  void wait(const Job& job) {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&job] { return job.done.load(); });
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      posted_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      Job& job = *jobs_.front();
      jobs_.pop_front();
      lock.unlock();
      job.work();
      lock.lock();
      job.done.store(true);  // the last look at it
      ended_.notify_all();
    }
  }

  const pid_t owner_ = ::getpid();
  std::mutex mutex_;
  std::condition_variable posted_, ended_;
  std::deque<Job*> jobs_;
  bool stopping_ = false;
  std::optional<Worker> worker_;
};

}  // namespace memhier
