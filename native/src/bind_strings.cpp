// Binds skip_strings, read_strings, split_pairs: vocabularies have a hundred thousand strings or more, and are read at
// every start of a model.

#include <nanobind/nanobind.h>

#include <cstring>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// The bytes of a buffer object, held as long as this lives.
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

// A string is stored as its length in 64 bits and its bytes. Calls take(bytes, length) for each. Returns the end of the
// last one.
template <class Take>
uint64_t each_string(const View& view, uint64_t at, uint64_t count, Take take) {
    for (uint64_t i = 0; i < count; ++i) {
        uint64_t length;
        if (at > view.size() || view.size() - at < sizeof length)
            throw nb::index_error("a string length lies past the end of the buffer");
        std::memcpy(&length, view.data() + at, sizeof length);
        at += sizeof length;
        if (view.size() - at < length) throw nb::index_error("a string ends past the end of the buffer");
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
        if (!PyUnicode_Check(text.ptr())) throw nb::type_error("an item is not a str");
        const Py_ssize_t length = PyUnicode_GET_LENGTH(text.ptr());
        const Py_ssize_t space = PyUnicode_FindChar(text.ptr(), ' ', 0, length, 1);
        if (space < 0 || PyUnicode_FindChar(text.ptr(), ' ', space + 1, length, 1) >= 0)
            throw nb::value_error("a text is not two parts with one space between them");
        pairs.append(nb::make_tuple(checked(PyUnicode_Substring(text.ptr(), 0, space)),
                                    checked(PyUnicode_Substring(text.ptr(), space + 1, length))));
    }
    return pairs;
}

}  // namespace

void bind_strings(nb::module_& m) {
    m.def("skip_strings", skip_strings, "buffer"_a, "at"_a, "count"_a,
          "The offset behind `count` strings, each stored as its length in 64 bits and its bytes. IndexError if that "
          "is past "
          "the end.");
    m.def("read_strings", read_strings, "buffer"_a, "at"_a, "count"_a,
          "-> the strings, and the offset behind them. UnicodeDecodeError if one is not UTF-8.");
    m.def("split_pairs", split_pairs, "texts"_a,
          "Splits each text at its only space. ValueError if a text has none or several.");
}
