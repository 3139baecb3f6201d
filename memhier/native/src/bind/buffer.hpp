// A Python object's memory, held for as long as C++ looks at it.
//
// The buffer protocol is used rather than nanobind's ndarray because it takes read-only maps and rows that lie any number
// of bytes apart, and costs a third of a microsecond.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace memhier {

class Buffer {
 public:
  enum class Access { read, write };

  Buffer() = default;  // holds nothing: an argument that was None

  Buffer(nanobind::handle object, Access access, bool contiguous = true) {
    const int flags =
        (contiguous ? PyBUF_C_CONTIGUOUS : PyBUF_STRIDES) | (access == Access::write ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nanobind::python_error();
  }

  static Buffer optional(nanobind::handle object, Access access) {
    return object.is_none() ? Buffer() : Buffer(object, access);
  }

  Buffer(Buffer&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
  Buffer& operator=(Buffer&&) = delete;

  ~Buffer() {  // needs the GIL, as the constructor does
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }

  bool empty() const { return view_.obj == nullptr; }
  std::size_t bytes() const { return static_cast<std::size_t>(view_.len); }
  std::size_t shape(int axis) const { return static_cast<std::size_t>(view_.shape[axis]); }
  std::ptrdiff_t stride(int axis) const { return view_.strides[axis]; }
  int axes() const { return view_.ndim; }

  template <class T>
  T* as() const {
    return static_cast<T*>(view_.buf);
  }
  template <class T>
  std::size_t count() const {
    return bytes() / sizeof(T);
  }

  // The last line of defence: memhier's Python modules check arguments and explain; this only keeps memory safe.
  void require(bool holds, const char* what) const {
    if (!holds) throw nanobind::value_error(what);
  }

 private:
  Py_buffer view_{};
};

}  // namespace memhier
