#define PK_ABI_DIGEST "b8dc7b1a826131ec"
