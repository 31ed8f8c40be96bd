#define PK_ABI_DIGEST "f4b8754ace0d401a"
