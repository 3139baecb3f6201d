// A pool of threads that call preadv, for systems and files without asynchronous reads.
#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "io/engine.hpp"
#include "io/system.hpp"
#include "io/worker.hpp"

namespace memhier {

class ThreadEngine;

class ThreadPool {
 public:
  explicit ThreadPool(unsigned depth) : threads_max_(std::min(depth, kThreadsMax)) {}

  ~ThreadPool() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    workers_.clear();
  }

  // Returns 0, or why not even one thread could be started.
  int submit(const std::vector<Io*>& reads, ThreadEngine& engine);
  std::size_t memory_bytes() const;
  std::size_t planned_bytes() const { return threads_max_ * Worker::kTouchedBytes; }

 private:
  // More in flight than this gained nothing on the devices measured, and each costs a switch per read.
  static constexpr unsigned kThreadsMax = 64;

  struct Task {
    Io* io;
    ThreadEngine* engine;
  };

  static void run(void* pool) { static_cast<ThreadPool*>(pool)->work(); }
  void work();

  const unsigned threads_max_;
  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::deque<Task> tasks_;  // at most the depth of every context
  std::size_t idle_ = 0;
  bool stopping_ = false;
  std::deque<Worker> workers_;
};

class ThreadEngine final : public Engine {
 public:
  ThreadEngine(std::shared_ptr<ThreadPool> pool, unsigned depth) : pool_(std::move(pool)) {
    queued_.reserve(depth);
    finished_.reserve(depth);
  }

  const char* name() const override { return "threads"; }
  std::size_t in_flight() const override { return in_flight_; }
  std::size_t memory_bytes() const override { return (queued_.capacity() + finished_.capacity()) * sizeof(Io*); }
  void queue(Io& io) override { queued_.push_back(&io); }
  void withdraw() override { queued_.clear(); }

  int submit_and_wait(std::size_t least, std::vector<Io*>& finished) override {
    if (!queued_.empty()) {
      if (const int error = pool_->submit(queued_, *this); error != 0) return error;
      in_flight_ += queued_.size();
      queued_.clear();
    }
    std::unique_lock lock(mutex_);
    enough_ = std::min(least, in_flight_);
    landed_.wait(lock, [this] { return finished_.size() >= enough_; });
    finished.insert(finished.end(), finished_.begin(), finished_.end());
    in_flight_ -= finished_.size();
    finished_.clear();
    return 0;
  }

  void finish(Io* io) {
    // Notified under the lock: once it is released the waiter may be gone, and this engine with it.
    const std::lock_guard lock(mutex_);
    finished_.push_back(io);
    if (finished_.size() == enough_) landed_.notify_one();
  }

 private:
  std::shared_ptr<ThreadPool> pool_;
  std::vector<Io*> queued_;
  std::size_t in_flight_ = 0;
  std::size_t enough_ = 0;
  std::mutex mutex_;
  std::condition_variable landed_;
  std::vector<Io*> finished_;
};

int ThreadPool::submit(const std::vector<Io*>& reads, ThreadEngine& engine) {
  {
    const std::lock_guard lock(mutex_);
    const std::size_t busy = workers_.size() - idle_;
    const std::size_t wanted = std::min<std::size_t>(threads_max_, busy + tasks_.size() + reads.size());
    while (workers_.size() < wanted) {
      try {
        workers_.emplace_back(&ThreadPool::run, this);
      } catch (const std::system_error& error) {
        if (workers_.empty()) return error.code().value();
        break;  // fewer threads do the same work
      }
    }
    for (Io* io : reads) tasks_.push_back({io, &engine});
  }
  for (std::size_t i = 0; i < reads.size(); ++i) work_.notify_one();
  return 0;
}

std::size_t ThreadPool::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  return workers_.size() * Worker::kTouchedBytes;
}

void ThreadPool::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    ++idle_;
    work_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    --idle_;
    if (tasks_.empty()) return;
    const Task task = tasks_.front();
    tasks_.pop_front();
    lock.unlock();
    Io& io = *task.io;
    ssize_t got;
    do {
      got = ::preadv(io.source->fd, io.parts, static_cast<int>(io.part_count),
                     static_cast<off_t>(io.offset + io.resumed));
    } while (got < 0 && errno == EINTR);
    io.result = got < 0 ? -errno : got;
    task.engine->finish(&io);
    lock.lock();
  }
}

std::unique_ptr<Engine> make_thread_engine(std::shared_ptr<ThreadPool> pool, unsigned depth) {
  return std::make_unique<ThreadEngine>(std::move(pool), depth);
}

std::shared_ptr<ThreadPool> make_thread_pool(unsigned depth) { return std::make_shared<ThreadPool>(depth); }

std::size_t memory_bytes_of(const ThreadPool& pool) { return pool.memory_bytes(); }

std::size_t planned_bytes_of(const ThreadPool& pool) { return pool.planned_bytes(); }

}  // namespace memhier
