// The hand-over of calls to a thread that makes them, and of the word that they have ended. Either thread lets go of
// the GIL before it wakes the other, which needs it: neither is woken to wait again.
#include <semaphore.h>
#include <time.h>

#include <cmath>
#include <deque>

#include "bind/module.hpp"

namespace nb = nanobind;

namespace memhier {
namespace {

class Relay {
 public:
  Relay() {
    sem_init(&given_, 0, 0);
    sem_init(&ended_, 0, 0);
  }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;
  ~Relay() {
    sem_destroy(&given_);
    sem_destroy(&ended_);
  }

  void put(nb::object task) {
    tasks_.push_back(std::move(task));
    sem_post(&given_);
  }

  void hand_over(nb::object task, double seconds) {
    tasks_.push_back(std::move(task));
    nb::gil_scoped_release released;
    sem_post(&given_);
    pause(seconds);
  }

  void wait(double seconds) {
    nb::gil_scoped_release released;
    pause(seconds);
  }

  nb::object next(bool ended) {
    {
      nb::gil_scoped_release released;
      if (ended) sem_post(&ended_);
      while (sem_wait(&given_) != 0) continue;
    }
    nb::object task = std::move(tasks_.front());
    tasks_.pop_front();
    return task;
  }

 private:
  // Returns on a signal as well, for which Python looks then.
  void pause(double seconds) {
    timespec until{};
    clock_gettime(CLOCK_REALTIME, &until);
    const double at = static_cast<double>(until.tv_nsec) + 1e9 * seconds;
    until.tv_sec += static_cast<time_t>(at / 1e9);
    until.tv_nsec = static_cast<long>(std::fmod(at, 1e9));
    sem_timedwait(&ended_, &until);
  }

  sem_t given_, ended_;
  std::deque<nb::object> tasks_;  // guarded by the GIL
};

}  // namespace
}  // namespace memhier

void register_relay(nb::module_& m) {
  using memhier::Relay;
  using namespace nb::literals;
  nb::class_<Relay>(m, "Relay")
      .def(nb::init<>())
      .def("put", &Relay::put, "task"_a.none())
      .def("hand_over", &Relay::hand_over, "task"_a, "seconds"_a)
      .def("wait", &Relay::wait, "seconds"_a)
      .def("next", &Relay::next, "ended"_a);
}
