// A thread that joins itself, and jobs on such a thread.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>

#include "io/system.hpp"

namespace memhier {

// std::thread would map 8 MiB of stack for a loop around system calls.
class Worker {
 public:
  static constexpr std::size_t kStackBytes = 256 << 10;
  static constexpr std::size_t kTouchedBytes = 8 << 10;  // the part of its stack that it comes to use

  // Throws std::system_error where no thread can be started.
  Worker(void (*body)(void*), void* argument) : body_(body), argument_(argument) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    const int error = pthread_create(&thread_, &attributes, run, this);
    pthread_attr_destroy(&attributes);
    if (error != 0) fail(error, "pthread_create");
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker() { pthread_join(thread_, nullptr); }

 private:
  static void* run(void* worker) {
    sigset_t all;  // signals are for the threads that run Python
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    const auto* self = static_cast<Worker*>(worker);
    self->body_(self->argument_);
    return nullptr;
  }

  void (*body_)(void*);
  void* argument_;
  pthread_t thread_;
};

// Makes jobs one after the other, on a thread that starts with the first.
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
