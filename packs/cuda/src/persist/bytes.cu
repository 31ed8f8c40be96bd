// The persistent decode kernel for models whose weights are Q8_0, with heads of 128 and pages in BF16: a third of the code, which lies together.
#define PK_PERSIST_ROWS 1
#define PK_PERSIST_SORT kBytes
#include "kernel.cu"
