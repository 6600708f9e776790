// Python sees: skip_strings, read_strings, split_pairs. Vocabularies have a hundred thousand strings or more, and are
// read whenever a model is started.

#include <nanobind/nanobind.h>

#include <cstring>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Bytes of an object that has some, as long as this lives.
class View {
 public:
    explicit View(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE)) throw nb::python_error();
    }
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    ~View() { PyBuffer_Release(&buffer_); }

    const char* data() const { return static_cast<const char*>(buffer_.buf); }
    uint64_t size() const { return uint64_t(buffer_.len); }

 private:
    Py_buffer buffer_;
};

// A string is its length in 64 bits, and its bytes. Calls take(its bytes, how many) for each; -> where the last one
// ends.
template <class Take>
uint64_t each_string(const View& view, uint64_t at, uint64_t count, Take take) {
    for (uint64_t i = 0; i < count; ++i) {
        uint64_t length;
        if (at > view.size() || view.size() - at < sizeof length) throw nb::index_error("a length lies past the end");
        std::memcpy(&length, view.data() + at, sizeof length);
        at += sizeof length;
        if (view.size() - at < length) throw nb::index_error("a string ends past the end");
        take(view.data() + at, length);
        at += length;
    }
    return at;
}

uint64_t skip_strings(nb::handle buffer, uint64_t at, uint64_t count) {
    return each_string(View(buffer), at, count, [](const char*, uint64_t) {});
}

nb::object checked(PyObject* made) {
    if (!made) throw nb::python_error();
    return nb::steal(made);
}

nb::tuple read_strings(nb::handle buffer, uint64_t at, uint64_t count) {
    nb::list strings;
    const uint64_t end = each_string(View(buffer), at, count, [&](const char* bytes, uint64_t length) {
        strings.append(checked(PyUnicode_DecodeUTF8(bytes, Py_ssize_t(length), "strict")));
    });
    return nb::make_tuple(strings, end);
}

nb::list split_pairs(const nb::list& texts) {
    nb::list pairs;
    for (nb::handle text : texts) {
        if (!PyUnicode_Check(text.ptr())) throw nb::type_error("a text is no string");
        const Py_ssize_t length = PyUnicode_GET_LENGTH(text.ptr());
        const Py_ssize_t space = PyUnicode_FindChar(text.ptr(), ' ', 0, length, 1);
        if (space < 0 || PyUnicode_FindChar(text.ptr(), ' ', space + 1, length, 1) >= 0)
            throw nb::value_error("a text is not two parts");
        pairs.append(nb::make_tuple(checked(PyUnicode_Substring(text.ptr(), 0, space)),
                                    checked(PyUnicode_Substring(text.ptr(), space + 1, length))));
    }
    return pairs;
}

}  // namespace

void bind_strings(nb::module_& m) {
    m.def("skip_strings", skip_strings, "buffer"_a, "at"_a, "count"_a,
          "Where `count` strings end, each its length in 64 bits and its bytes; IndexError if that is past the end");
    m.def("read_strings", read_strings, "buffer"_a, "at"_a, "count"_a,
          "-> the strings, and where they end; UnicodeDecodeError if one is not UTF-8");
    m.def("split_pairs", split_pairs, "texts"_a,
          "Two parts of each text, with one space between them; ValueError if one has more or none");
}
