#define PK_ABI_DIGEST "f2d4610a3c99dbf3"
