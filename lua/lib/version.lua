-- The protocol version: what the keys and fields of a request mean. open and submit write it into
-- meta; a request without the field is of version 1. docs/upgrading.md says when it goes up.
-- This is the highest version that these scripts know. It is that of stages of flows: a worker that
-- knows less leaves them alone.
local PROTOCOL = 3
local FLOW = 3
-- Plain requests are of this version. Fields of a submission that earlier scripts would ignore, and
-- must not, come with a higher one.
local PLAIN = 1

-- Returns the refusal for a request that a later version made, or nil if we know its version.
local function newer_than_known(version)
  version = tonumber(version) or 1
  if version > PROTOCOL then
    return redis.error_reply("NEWER the request has protocol version " .. version
      .. ", and this streamq knows versions up to " .. PROTOCOL .. ": upgrade streamq here")
  end
  return nil
end
