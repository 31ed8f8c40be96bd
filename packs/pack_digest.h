#define PK_ABI_DIGEST "78ec3cef3a9df3b8"
