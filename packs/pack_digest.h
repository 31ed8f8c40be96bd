#define PK_ABI_DIGEST "89528e6ce857efbe"
