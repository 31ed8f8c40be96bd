#define PK_ABI_DIGEST "ccb8c1b7b25e6603"
