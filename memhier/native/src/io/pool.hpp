// The contexts of one reader in one process: made when first needed, few, and lent to one call at a time.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <string>

#include "io/context.hpp"

namespace memhier {

class Pool {
 public:
  // `engine` is "uring", "aio", "threads", or "auto" for the first of them that can be had; `contexts` are made at
  // most. `depth` and `run_pages` as of a context. Throws std::system_error.
  Pool(const std::string& engine, unsigned depth, unsigned contexts, unsigned run_pages);
  ~Pool() { close(); }

  const char* engine() const { return engine_; }
  bool made_here() const { return owner_ == ::getpid(); }

  // A context on loan; false if the pool was closed.
  class Loan {
   public:
    explicit Loan(Pool& pool) : pool_(pool), context_(pool.take()) {}
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    ~Loan() {
      if (context_ != nullptr) pool_.give_back(context_);
    }
    explicit operator bool() const { return context_ != nullptr; }
    Context* operator->() const { return context_; }

   private:
    Pool& pool_;
    Context* context_;
  };

  // A context that may be kept from call to call, until it is given back; null unless others are left for the calls
  // meanwhile. One at a time.
  Context* keep();
  void give_back_kept(Context* context);

  std::size_t memory_bytes() const;
  // The bytes that one calling thread at a time will come to hold.
  std::size_t planned_bytes() const { return planned_bytes_; }
  // Waits for every loan, then frees all.
  void close();

 private:
  std::unique_ptr<Context> make_context() const;
  void add_context();
  Context* take();
  void give_back(Context* context);

  const unsigned depth_, run_pages_;
  const pid_t owner_ = ::getpid();
  const char* engine_ = nullptr;
  std::size_t planned_bytes_ = 0;
  std::shared_ptr<ThreadPool> threads_;
  mutable std::mutex mutex_;
  std::condition_variable returned_;
  std::vector<std::unique_ptr<Context>> contexts_;
  std::vector<Context*> idle_;
  std::size_t contexts_max_;
  bool closed_ = false, keeping_ = false;
};

}  // namespace memhier
