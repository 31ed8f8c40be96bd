// The persistent decode kernel for models whose weights are Q4_K and Q6_K, with heads of 128 and pages in BF16: a third of the code, which lies together.
#define PK_PERSIST_ROWS 1
#define PK_PERSIST_SORT kNibbles
#include "kernel.cu"
