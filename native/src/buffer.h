#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace quire {

// Uninitialized memory, aligned to a cache line. Pages that are never touched take no memory.
template <class T>
class Buffer {
 public:
    void reserve(size_t n) {
        if (n > size_) data_.reset(static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64)))), size_ = n;
    }
    T* get() const { return data_.get(); }

 private:
    struct Free {
        void operator()(T* p) const { ::operator delete(p, std::align_val_t(64)); }
    };
    std::unique_ptr<T, Free> data_;
    size_t size_ = 0;
};

}  // namespace quire
