// The Python module trainwright._C_cuda: importing it loads the library, whose static initialisers
// register the CUDA kernels with the torch dispatcher.
#include <Python.h>

PyMODINIT_FUNC PyInit__C_cuda(void) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
