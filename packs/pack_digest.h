#define PK_ABI_DIGEST "2b3fb1ea88804d6f"
