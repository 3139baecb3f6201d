// A thread that joins itself. std::thread would map 8 MiB of stack for a loop around system calls.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <cstddef>

#include "io/system.hpp"

namespace memhier {

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

}  // namespace memhier
