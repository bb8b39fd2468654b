"""The files that the static patch changes, as the releases have them."""

from __future__ import annotations

KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "0.16": {
        "megatron/core/distributed/distributed_data_parallel.py": (
            "e8ae6762dbb519cbd2baeb8fbb4eab377efeaeac82b04d9e7487e4cbe8c2992f",
        ),
        "megatron/core/distributed/finalize_model_grads.py": (
            "b81ca0352fe0120a04839a5928388a9b0edcc35da30b44f1b7d38eae90a487b5",
        ),
        "megatron/core/distributed/fsdp/mcore_fsdp_adapter.py": (
            "cef1948822aebc0894cf89bd84873e737c9794d04edac72b14fdd7ec48d35ef9",
        ),
        "megatron/core/distributed/param_and_grad_buffer.py": (
            "e10c283edfcab3a61c55abd929f48a2d279773067614d70a7798bf3b7f5c6bee",
        ),
        "megatron/core/distributed/torch_fully_sharded_data_parallel.py": (
            "c01769a760b6aec501deb2617744d8b111aadd3eeac2f31b467e4903af1476c6",
        ),
        "megatron/core/optimizer/optimizer.py": ("32e7cfd874c72b00a7b68faff5c5a66aaeec74d414aea70f1a213247dd3d02c0",),
        "megatron/core/rerun_state_machine.py": ("9b1788b0373d893906a13057380d64d34c005077f8dbcb376e888c68c75c9afb",),
        "megatron/training/arguments.py": ("cf7544e48b49c9ebce2160e2369ee0c8bd6560c17dfc7c34fda2df9997629639",),
        "megatron/training/checkpointing.py": ("ef00f722c5075cb831dd499dc799b8b3bca7e8247f1e19bdc06b22d9713b3b58",),
        "megatron/training/training.py": ("457cd234a88659aa395a988366e60e61f2c9d16a51df7efc8cc09c1f22fd48b1",),
        "megatron/training/yaml_arguments.py": ("97a95fcb27dd0efdcd8640b607f30197ef58c5a0d5dbf8955c481d2b681c599e",),
    },
    "0.17": {
        "megatron/core/distributed/distributed_data_parallel.py": (
            "58dc68406dc225dc702febb3fac65036e119abda51bf6635ea60a016a91050c2",
            "5fe4e6acd6ed5b02c95118ed903eae0ac9cf3fb88bba629d7dc3525616dbe1d2",
        ),
        "megatron/core/distributed/finalize_model_grads.py": (
            "ea1569279231040ba44d08848e6b1384188e07f00f20a46a28d7bdd3a932dee8",
        ),
        "megatron/core/distributed/fsdp/mcore_fsdp_adapter.py": (
            "08899c10067341c7346c230de78f8d574ed614b64e1438afb28e61122e98e63e",
        ),
        "megatron/core/distributed/param_and_grad_buffer.py": (
            "ad0432d920bfe7d734b42aad5741410e3d88f2aa650466411d82eda0d938ee74",
            "88a369c7e009175caa80ae21bdc792d767a113076ca9b2f11116cd1400e53ea6",
        ),
        "megatron/core/distributed/torch_fully_sharded_data_parallel.py": (
            "c01769a760b6aec501deb2617744d8b111aadd3eeac2f31b467e4903af1476c6",
        ),
        "megatron/core/optimizer/optimizer.py": ("d0961351007072d49c73cd6b105128379a8ce8db6d985c32533cf5c1a61ca4e4",),
        "megatron/core/rerun_state_machine.py": ("4fba582b98d648b813184be3eac7adae17c6c2a00738bafd74501ad43602a754",),
        "megatron/training/arguments.py": (
            "8b286ef290df529febdc27376b74cb891e9e48f8b6f60ea3d41c383b43b4a549",
            "f438b33c37fea5dcd1a20f99bb645dde88ceed729c08942ddab3b35200efc487",
        ),
        "megatron/training/checkpointing.py": (
            "e3ebedab7820d0b3a3d3b0720328aa642b84133ab02b308411f4ba16a3726053",
            "b6e61f58488638b06daa41a65097a4cfb4406d4199a47850f3457ebdb7fc6529",
        ),
        "megatron/training/training.py": (
            "fdf0943bfba7cecdc2be29998825d665c61da5665a542b90a36d1606c96f06e2",
            "7dc99db44960b23a353444d1e0bc59419994a8085b3eef78de02a2a0d2c70450",
        ),
        "megatron/training/yaml_arguments.py": ("d787cfc659e0ec2daf40c370c44dbc723b1fa46d0ca3b2e5657eaa6420417627",),
    },
    "0.18": {
        "megatron/core/distributed/distributed_data_parallel.py": (
            "5b0a65ea241bc98d4264832439538d506926553d48e3ce52d0e07fadad421c3c",
        ),
        "megatron/core/distributed/finalize_model_grads.py": (
            "077320bac085b668c7742a276442a6e4a5f6eb44058f9cbdef2c5b11bbee76e1",
        ),
        "megatron/core/distributed/fsdp/mcore_fsdp_adapter.py": (
            "8fc16aedcf6eefdf4f5f36fc38b8ca84e675f2488c09169306e745d1b0c2aec7",
        ),
        "megatron/core/distributed/param_and_grad_buffer.py": (
            "3fa532862dbf10bde79efac5c8f1aeb539df12d0378b99d0a48552d6a7168d3b",
        ),
        "megatron/core/distributed/torch_fully_sharded_data_parallel.py": (
            "c01769a760b6aec501deb2617744d8b111aadd3eeac2f31b467e4903af1476c6",
        ),
        "megatron/core/optimizer/optimizer.py": ("bc70856659b0485d78c7876cd0a1393354a40691f5a459fe551efc20d6b9672a",),
        "megatron/core/rerun_state_machine.py": ("3a40b9d7fcda7e494048eb7131055da076d68262a58cc7d85c53e103203ed9d6",),
        "megatron/core/transformer/moe/paged_stash.py": (
            "5485c2b84f05c9ab5bd897fe7c9e6410cfed44b418097369f8530e531bb734b9",
        ),
        "megatron/training/arguments.py": (
            "fdc1b6e21467ab45a57f45274321bf76567ca4bbc135544ef41ae8c0fc6d5ed8",
            "05d98ef2f7558232076a134fc627e1d8065bf13a7ad898da39ec415ff0ac20ab",
        ),
        "megatron/training/checkpointing.py": ("c4b4afd0fb3fda8ea41ec2f765630caa771e8f5df417e85017c6ba159b4ce555",),
        "megatron/training/training.py": ("78afdf7b3f99adc0367d57946b6ac3acd2a5b898b6dc4cca708d4fcc110a9487",),
        "megatron/training/yaml_arguments.py": ("57ffeda983b16782e41c7ac4927f0c07a6f71851bfee18224619be83e788961b",),
    },
    "0.19": {
        "megatron/core/distributed/distributed_data_parallel.py": (
            "0c98de1a2a07d32c27df1f82767885524a2890adb8c89d948767dd5800f24b84",
        ),
        "megatron/core/distributed/finalize_model_grads.py": (
            "4b9cfce7c55487a606d3c5192b8da8044a6383bcc670e0ded18846b6d3221c1b",
        ),
        "megatron/core/distributed/fsdp/mcore_fsdp_adapter.py": (
            "7a17a721e8f61e72d6e069059a8d17c629e830ba3190200663feda9ef06e0ff0",
        ),
        "megatron/core/distributed/param_and_grad_buffer.py": (
            "065661bc10c66e577abe85d6e901176a973fef9239de1467652cf81156fe4b0b",
        ),
        "megatron/core/distributed/torch_fully_sharded_data_parallel.py": (
            "324dbbcf87b91fe57e2329a10af62732dbcda0bf87ca1d2d72307c3b5b3f77c4",
        ),
        "megatron/core/optimizer/optimizer.py": ("24609822f7c165c9be9f6e95945c873bf474cdce3ca06600b00b52c5d23b31e4",),
        "megatron/core/rerun_state_machine.py": ("628f9550686505275eddfda7f444ebee51c573f0790d6927027444660f51a5ea",),
        "megatron/core/transformer/moe/paged_stash.py": (
            "177ebdfd87367c2944e38bb62ef2b99ab2e26eb277a987e1dc56645f9f43b57a",
        ),
        "megatron/training/arguments.py": ("f7fad20bc0e0cd9ba4b9ba7e70fa1a1b77030dfd020a7edb50b1d3b3aa41ebf6",),
        "megatron/training/checkpointing.py": ("b4b4fcc725d543dd382a838dc72679c9de4dca8502ee274d8864c46ab55bba49",),
        "megatron/training/training.py": ("d968ef8216f63d6373372190ac895fc905234c116bba3e804d2951876e6ad98c",),
        "megatron/training/yaml_arguments.py": ("a916392ac42350dbbf4fc854795e2a58be618b5fd6b55e8a6f97604bf0fb63a9",),
    },
}
"""Release -> file -> SHA-256 of its content in the first and the latest patch release, which mostly are the same."""
