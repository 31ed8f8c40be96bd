#define PK_ABI_DIGEST "5e6fbf8f60bd8dae"
