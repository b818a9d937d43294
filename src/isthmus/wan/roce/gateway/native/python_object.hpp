// Owned references to Python objects, and calls that turn a Python error into `PythonError`.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <utility>

namespace isthmus {

struct PythonError {};  // the interpreter's error indicator is set

class Object {
  public:
    Object() = default;
    static Object stolen(PyObject *one) {
        if (one == nullptr) throw PythonError();
        return Object(one);
    }
    static Object borrowed(PyObject *one) {
        Py_INCREF(one);
        return Object(one);
    }
    Object(const Object &other) : one_(other.one_) { Py_XINCREF(one_); }
    Object(Object &&other) noexcept : one_(std::exchange(other.one_, nullptr)) {}
    Object &operator=(Object other) noexcept {
        std::swap(one_, other.one_);
        return *this;
    }
    ~Object() { Py_XDECREF(one_); }

    PyObject *get() const { return one_; }
    explicit operator bool() const { return one_ != nullptr; }
    bool is_none() const { return one_ == Py_None; }
    Object attribute(const char *name) const { return stolen(PyObject_GetAttrString(one_, name)); }
    Object item(Py_ssize_t place) const { return stolen(PySequence_GetItem(one_, place)); }
    double as_double() const {
        const double value = PyFloat_AsDouble(one_);
        if (value == -1.0 && PyErr_Occurred()) throw PythonError();
        return value;
    }
    int64_t as_int() const {
        const long long value = PyLong_AsLongLong(one_);
        if (value == -1 && PyErr_Occurred()) throw PythonError();
        return value;
    }

  private:
    explicit Object(PyObject *one) : one_(one) {}
    PyObject *one_ = nullptr;
};

// The bytes of a `bytes` object.
inline const uint8_t *data_of(PyObject *bytes) { return reinterpret_cast<const uint8_t *>(PyBytes_AS_STRING(bytes)); }

inline Object bytes_of(const uint8_t *data, size_t size) {
    return Object::stolen(PyBytes_FromStringAndSize(reinterpret_cast<const char *>(data), Py_ssize_t(size)));
}

inline void write_u32(uint8_t *at, uint32_t value) {
    at[0] = uint8_t(value >> 24), at[1] = uint8_t(value >> 16), at[2] = uint8_t(value >> 8), at[3] = uint8_t(value);
}
inline uint32_t read_u32(const uint8_t *at) {
    return uint32_t(at[0]) << 24 | uint32_t(at[1]) << 16 | uint32_t(at[2]) << 8 | at[3];
}
inline uint32_t read_u16(const uint8_t *at) { return uint32_t(at[0]) << 8 | at[1]; }

}  // namespace isthmus
