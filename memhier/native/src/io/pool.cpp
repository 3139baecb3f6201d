// The choice of an engine, and the loans of contexts.
#include "io/pool.hpp"

#include <array>
#include <string_view>

namespace memhier {
namespace {

// In the order they are tried.
constexpr std::array<const char*, 3> kEngines = {"uring", "aio", "threads"};

}  // namespace

Pool::Pool(const std::string& engine, unsigned depth, unsigned contexts, unsigned run_pages)
    : depth_(depth), run_pages_(run_pages), threads_(make_thread_pool(depth)), contexts_max_(contexts) {
  for (const char* name : kEngines) {
    if (engine != "auto" && engine != name) continue;
    engine_ = name;
    try {
      contexts_.push_back(make_context());
      idle_.push_back(contexts_.back().get());
      planned_bytes_ = contexts_.back()->planned_bytes();
      if (std::string_view(name) == "threads") planned_bytes_ += planned_bytes_of(*threads_);
      return;
    } catch (const std::system_error&) {
      if (engine == name || name == kEngines.back()) throw;
    }
  }
  fail(EINVAL, "unknown engine");
}

std::unique_ptr<Context> Pool::make_context() const {
  const std::string_view name = engine_;
  if (name == "uring") return std::make_unique<Context>(depth_, run_pages_, make_uring_engine(depth_), nullptr);
  if (name == "aio")
    return std::make_unique<Context>(depth_, run_pages_, make_aio_engine(depth_), make_thread_engine(threads_, depth_));
  return std::make_unique<Context>(depth_, run_pages_, make_thread_engine(threads_, depth_), nullptr);
}

Context* Pool::take() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (closed_) return nullptr;
    if (idle_.empty()) add_context();
    if (!idle_.empty()) {
      Context* context = idle_.back();
      idle_.pop_back();
      return context;
    }
    returned_.wait(lock);
  }
}

// Makes another context, if there may be more.
void Pool::add_context() {
  if (contexts_.size() >= contexts_max_) return;
  try {
    contexts_.push_back(make_context());
    idle_.push_back(contexts_.back().get());
  } catch (const std::system_error&) {
    contexts_max_ = contexts_.size();  // the system's limit; there is one context at least, to wait for
  }
}

Context* Pool::keep() {
  const std::lock_guard lock(mutex_);
  if (closed_ || keeping_) return nullptr;
  if (contexts_.size() < 2) add_context();
  if (contexts_.size() < 2 || idle_.empty()) return nullptr;
  Context* context = idle_.back();
  idle_.pop_back();
  keeping_ = true;
  return context;
}

void Pool::give_back_kept(Context* context) {
  {
    const std::lock_guard lock(mutex_);
    keeping_ = false;
  }
  give_back(context);
}

void Pool::give_back(Context* context) {
  {
    const std::lock_guard lock(mutex_);
    idle_.push_back(context);
  }
  returned_.notify_all();
}

std::size_t Pool::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t total = memory_bytes_of(*threads_);
  for (const auto& context : contexts_) total += context->memory_bytes();
  return total;
}

void Pool::close() {
  std::unique_lock lock(mutex_);
  closed_ = true;
  returned_.notify_all();
  returned_.wait(lock, [this] { return idle_.size() == contexts_.size(); });
  idle_.clear();
  contexts_.clear();
}

}  // namespace memhier
