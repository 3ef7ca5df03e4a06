module streamq

go 1.19
