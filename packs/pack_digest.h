#define PK_ABI_DIGEST "1d079bd3cccb4fc6"
