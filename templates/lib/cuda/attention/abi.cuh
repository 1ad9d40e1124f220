// The argument struct of every forward kernel, written from codegen/src/abi.rs.

@{ forward_args }@
