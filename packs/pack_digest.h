#define PK_ABI_DIGEST "7acb9b20c95d5ad4"
