#define PK_ABI_DIGEST "971d39dd6bbe1bbf"
