/* Names, the shared index and the directory's key table, as one library. Twins in Python: see each module. */
#include "key_cutter.h"
#include "key_table.h"
#include "shared_index.h"
