-- One slice of an evaluation has arrived. ARGV: ticket id, version, first task, tasks, how many of them were answered, sum
-- of scores, the group's bytes.
-- Returns 'evaluated', 'duplicate' or 'void'. The bytes are kept until the next evaluation is asked for.
local id, eval, slice = ARGV[1], key('eval:' .. ARGV[2]), ARGV[3] .. ':' .. ARGV[4]
if not redis.call('ZSCORE', key('eval_issued:' .. ARGV[2]), slice) then
  if redis.call('SISMEMBER', eval .. ':groups', id) == 1 then return 'duplicate' end
  return 'void'
end
redis.call('HINCRBYFLOAT', eval, 'sum', ARGV[6])  -- the first write, because it is the one that Redis may refuse
end_slice(ARGV[2], slice)
redis.call('SADD', eval .. ':groups', id)
redis.call('SET', key('group:' .. id), ARGV[7])
settle_tasks(ARGV[2], ARGV[5], ARGV[4] - ARGV[5])
return 'evaluated'
