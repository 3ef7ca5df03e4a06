module goworker

go 1.19

require streamq v0.0.0

replace streamq => ../../../clients/go
