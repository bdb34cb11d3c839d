"""What aotc changes of Inductor while it compiles: one reason a module, all entered by `codegen.aot_inductor`."""
