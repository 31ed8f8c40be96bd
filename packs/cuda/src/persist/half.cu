// The persistent decode kernel for keys and values in F16, beside the one for BF16 and not in it: so neither moves the other's machine code.
#define PK_PERSIST_ROWS 1
#define PK_PERSIST_SORT kHalfPages
#include "kernel.cu"
