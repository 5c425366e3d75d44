-- Fixes the identity of the run. args: names, values; a field that is set keeps its value. Returns the values in Redis.
local fixed = {}
for i, name in ipairs(args.names) do
  redis.call('HSETNX', key('identity'), name, args.values[i])
  fixed[i] = redis.call('HGET', key('identity'), name)
end
return fixed
