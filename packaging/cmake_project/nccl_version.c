/* Prints the version of the libnccl that the program is linked with. */
#include <nccl.h>
#include <stdio.h>

int main(void) {
    int version = 0;
    if (ncclGetVersion(&version) != ncclSuccess) return 1;
    printf("nccl %d\n", version);
    return 0;
}
