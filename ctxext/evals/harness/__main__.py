from ctxext.evals.harness import main

main()
