// Arrays that Python hands to the core: every call takes them as Array<T, axes>, and the stub names their types.
//
// An array is held through the buffer protocol for as long as C++ looks at it. This takes read-only maps and costs a
// third of a microsecond, less than nanobind's ndarray. The element size and the number of axes are checked here;
// memhier's Python modules check the rest before and explain it, and `require` in a call only keeps memory safe.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cassert>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace memhier {

inline void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

// C-contiguous elements of one type, to read (const T) or to write. A struct of T is a record of a NumPy dtype with the
// same fields. std::byte stands for elements of any type, and no axes for any number of them. A destructor needs the
// GIL: functions take arrays by const reference, and structs are made and dropped by Python.
template <class T, int axes = 0>
class Array {
 public:
  Array() = default;
  Array(Array&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
  Array& operator=(Array&& other) noexcept {
    std::swap(view_, other.view_);
    return *this;
  }
  ~Array() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }

  // Takes an object's memory; false, with no error set, where it has none of this kind.
  bool take(nanobind::handle object) noexcept {
    const int flags = PyBUF_C_CONTIGUOUS | (std::is_const_v<T> ? 0 : PyBUF_WRITABLE);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
      PyErr_Clear();
      return false;
    }
    return (kAnyType || view_.itemsize == static_cast<Py_ssize_t>(sizeof(T))) && (axes == 0 || view_.ndim == axes);
  }

  T* data() const { return static_cast<T*>(view_.buf); }
  T& operator[](std::size_t index) const { return data()[index]; }
  std::size_t size() const { return static_cast<std::size_t>(view_.len) / sizeof(T); }
  std::size_t bytes() const { return static_cast<std::size_t>(view_.len); }
  std::size_t item_bytes() const { return static_cast<std::size_t>(view_.itemsize); }
  std::size_t shape(int axis) const {
    assert(axis < view_.ndim);
    return static_cast<std::size_t>(view_.shape[axis]);
  }
  // Whether the shape is this one.
  bool has_shape(std::convertible_to<std::size_t> auto... sizes) const
    requires(sizeof...(sizes) == axes)
  {
    int axis = 0;
    return ((shape(axis++) == static_cast<std::size_t>(sizes)) && ...);
  }

 private:
  static constexpr bool kAnyType = std::is_same_v<std::remove_const_t<T>, std::byte>;
  Py_buffer view_{};
};

// Rows to read that may lie any number of bytes apart, of elements of any type.
class StridedRows {
 public:
  StridedRows() = default;
  StridedRows(const StridedRows&) = delete;
  StridedRows& operator=(const StridedRows&) = delete;
  ~StridedRows() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }

  bool take(nanobind::handle object) noexcept {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_STRIDES) == 0) return view_.ndim == 2;
    PyErr_Clear();
    return false;
  }

  const std::byte* data() const { return static_cast<const std::byte*>(view_.buf); }
  std::size_t shape(int axis) const { return static_cast<std::size_t>(view_.shape[axis]); }
  std::ptrdiff_t stride(int axis) const { return view_.strides[axis]; }

 private:
  Py_buffer view_{};
};

}  // namespace memhier

namespace nanobind::detail {

template <class T>
constexpr auto element_name() {
  if constexpr (std::is_class_v<T>)
    return const_name("void");
  else if constexpr (std::is_same_v<T, bool>)
    return const_name("bool_");
  else if constexpr (std::is_floating_point_v<T>)
    return const_name("float") + const_name<8 * sizeof(T)>();
  else if constexpr (std::is_signed_v<T>)
    return const_name("int") + const_name<8 * sizeof(T)>();
  else
    return const_name("uint") + const_name<8 * sizeof(T)>();
}

template <class T>
constexpr auto array_name() {
  if constexpr (std::is_same_v<T, std::byte>)
    return const_name("numpy.typing.NDArray[typing.Any] | memoryview");
  else
    return const_name("numpy.typing.NDArray[numpy.") + element_name<T>() + const_name("]");
}

template <class T, int axes>
struct type_caster<memhier::Array<T, axes>> {
  using Taken = memhier::Array<T, axes>;
  NB_TYPE_CASTER(Taken, array_name<std::remove_const_t<T>>())
  bool from_python(handle source, std::uint32_t, cleanup_list*) noexcept { return value.take(source); }
};

template <>
struct type_caster<memhier::StridedRows> {
  NB_TYPE_CASTER(memhier::StridedRows, const_name("numpy.typing.NDArray[typing.Any]"))
  bool from_python(handle source, std::uint32_t, cleanup_list*) noexcept { return value.take(source); }
};

}  // namespace nanobind::detail
