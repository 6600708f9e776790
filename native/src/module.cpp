// The Python module `quire._native`.

#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_batch(nb::module_& m);
void bind_drafts(nb::module_& m);
void bind_matrix(nb::module_& m);
void bind_tape(nb::module_& m);
void bind_sampler(nb::module_& m);
void bind_search(nb::module_& m);
void bind_sentencepiece(nb::module_& m);
void bind_strings(nb::module_& m);

NB_MODULE(_native, m) {
    m.doc() = "CPU kernels of Quire";
    nb::set_leak_warnings(false);  // a process may exit with a loaded model, and the engine freezes the heap
    bind_batch(m);
    bind_drafts(m);
    bind_matrix(m);
    bind_tape(m);
    bind_sampler(m);
    bind_search(m);
    bind_sentencepiece(m);
    bind_strings(m);
}
