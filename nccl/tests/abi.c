/* Prints `name value` for everything of nccl.h whose number is part of the ABI: enumerators,
 * constants, sizes, offsets. Compiled with one header or the other, it must print the same. */
#include <nccl.h>

#include <stddef.h>
#include <stdio.h>

#define NUMBER(name) printf(#name " %lld\n", (long long)(name))
#define SIZE(type) printf("sizeof " #type " %zu\n", sizeof(type))
#define FIELD(type, field) printf(#type "." #field " %zu\n", offsetof(type, field))

int main(void) {
#include "abi_numbers.h"

  SIZE(ncclUniqueId);
  SIZE(ncclResult_t);
  SIZE(ncclDataType_t);
  SIZE(ncclRedOp_t);
  SIZE(ncclScalarResidence_t);
  SIZE(ncclComm_t);
  SIZE(ncclWindow_t);

#include "abi_fields.h"

  FIELD(ncclConfigExt_t, next);
  FIELD(ncclConfigExt_t, key.vendorId);
  FIELD(ncclConfigExt_t, key.optionId);
  FIELD(ncclConfigExt_t, val.i);
  FIELD(ncclConfigExt_t, val.s);
  FIELD(ncclConfigExt_t, val.raw);
  SIZE(ncclConfigExt_t);
  FIELD(ncclEncryptionConfig_t, mode);
  FIELD(ncclEncryptionConfig_t, psk);
  SIZE(ncclEncryptionConfig_t);
  FIELD(ncclWaitSignalDesc_t, opCnt);
  FIELD(ncclWaitSignalDesc_t, peer);
  FIELD(ncclWaitSignalDesc_t, sigIdx);
  FIELD(ncclWaitSignalDesc_t, ctx);
  SIZE(ncclWaitSignalDesc_t);
  SIZE(ncclCommMemStat_t);
  SIZE(ncclHostCftMode_t);
  SIZE(ncclNvlsHostMode_t);

  /* Values that the initializers set. */
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclCollConfig_t call = NCCL_COLLCONFIG_INITIALIZER;
  ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
  ncclEncryptionConfig_t secret = NCCL_ENCRYPTION_CONFIG_INITIALIZER;
  printf("config %zu %x %u %d %p %d\n", config.size, config.magic, config.version, config.blocking,
         (const void *)config.commName, config.nvlsHostMode);
  printf("call %zu %x %u %p %d %d\n", call.size, call.magic, call.version, (void *)call.ext,
         call.forceAlgSelection, call.CTAPolicy);
  printf("info %zu %x %u %g\n", info.size, info.magic, info.version, info.estimatedTime);
  printf("secret %zu %x %u %d\n", secret.size, secret.magic, secret.version, secret.mode);
  NUMBER(NCCL_VERSION(2, 8, 4));
  NUMBER(NCCL_VERSION(2, 28, 9));
  NUMBER(NCCL_VERSION_CODE);
  return 0;
}
